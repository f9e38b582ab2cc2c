"""Claims: statements on the cells of a study, and verdicts on them by paired tests over seeds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from pydantic import Field, model_validator

from polyfed.core.settings import Settings
from polyfed.reporting.statistics import FEWEST_SEEDS, PairedSpreads, Sample, holm

Kind = Literal["method", "part", "setting"]
"""What a judged claim is about."""

KINDS: tuple[Kind, ...] = ("method", "part", "setting")

ALL = "all"
"""Label of the mean over all points of the axes at which every row of a claim is run."""

_CLAIM = re.compile(r"(?P<left>.+?) (?P<sign>>=|<=|>|<) (?P<right>.+?)(?: by (?P<by>\d*\.?\d+))?")
_OPERAND = re.compile(r"(?P<row>.*?)(?: at (?P<at>.+?))?(?: on (?P<column>.+?)(?: at (?P<at_end>.+?))?)?")
_STD, _MINUS = "std of ", " - "
_GRAMMAR = (
    "'SIDE > SIDE on COLUMN [at LABEL] [by MARGIN]'; a SIDE is ROW [at LABEL] [on COLUMN], the difference of two such, "
    "or 'std of ROW'"
)


@dataclass(frozen=True)
class Operand:
    """A cell over all its seeds.

    Attributes:
        row, column: its row, and which figure.
        label: of its point; ``ALL``: the mean over points; empty where the claim names none.
    """

    row: str
    column: str
    label: str = ""


Side = tuple[Operand, ...]
"""One operand, or two: the first minus the second."""


@dataclass(frozen=True)
class Claim:
    """``SIDE > SIDE on COLUMN [at LABEL] [by MARGIN]``; column and label at the end are those of every row without.

    ``A > B by m`` says that A is above B by more than m; ``A >= B by m`` that A is not below B by more than m.

    Attributes:
        text: as it is written.
        left, right: what is compared.
        sign: one of > < >= <=.
        margin: m, 0 unless it is given.
        is_of_spreads: whether standard deviations over seeds are compared, in place of means.
        kind: what it is about, if it is judged.
    """

    text: str
    left: Side
    right: Side
    sign: str
    margin: float = 0.0
    is_of_spreads: bool = False
    kind: Kind | None = None

    @classmethod
    def parse(cls, text: str) -> Claim:
        """From its text.

        Raises:
            ValueError: it has another form.
        """
        matched = _matched(_CLAIM, text.strip(), text)
        end = _matched(_OPERAND, matched["right"].split(_MINUS)[-1], text)
        sides = [matched["left"], matched["right"]]
        is_of_spreads = all(side.startswith(_STD) for side in sides)
        if is_of_spreads:
            sides = [side.removeprefix(_STD) for side in sides]
        left, right = (_operands(side, end["column"] or "", end["at_end"] or "") for side in sides)
        claim = cls(text, left, right, matched["sign"], float(matched["by"] or 0), is_of_spreads)
        claim._check()
        return claim

    def _check(self) -> None:
        if not all(operand.row and operand.column for operand in self.operands) or max(map(len, self.sides)) > 2:
            raise ValueError(f"'{self.text}' has not the form {_GRAMMAR}")
        if self.is_of_spreads and (len(self.operands) > 2 or self.margin):
            raise ValueError(f"'{self.text}': compare 'std of ROW' with 'std of ROW', without 'by'")
        if ALL in self.labels and len(self.labels) > 1:
            raise ValueError(f"'{self.text}': 'at {ALL}' is for every row of a claim or for none")

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.left, self.right

    @property
    def operands(self) -> Side:
        return self.left + self.right

    @property
    def labels(self) -> set[str]:
        """Of the points that it names; an empty one stands for rows without."""
        return {operand.label for operand in self.operands}

    @property
    def read_at(self) -> str:
        """Label of the point at which it is read, where its text names none."""
        given = Claim.parse(self.text).operands
        return next((own.label for own, written in zip(self.operands, given, strict=True) if not written.label), "")

    def at(self, label: str) -> Claim:
        """The claim at a point, where it does not say at which."""
        left, right = (tuple(replace(operand, label=operand.label or label) for operand in side) for side in self.sides)
        return replace(self, left=left, right=right)

    def towards(self, sample: Sample) -> Sample:
        """What must be above for the claim to hold, of left and right: beyond the margin, in its direction."""
        if isinstance(sample, PairedSpreads):
            return sample if self.sign.startswith(">") else PairedSpreads(sample.right, sample.left)
        beyond = {seed: self._excess(value) for seed, value in sample.by_seed.items()}
        return replace(sample, by_seed=beyond, known_step=sample.step)  # a margin is no step that figures move in

    def _excess(self, difference: float) -> float:
        ahead = difference if self.sign.startswith(">") else -difference
        return ahead + self.margin if self.sign.endswith("=") else ahead - self.margin


def _matched(form: re.Pattern[str], part: str, text: str) -> re.Match[str]:
    matched = form.fullmatch(part)
    if matched is None:
        raise ValueError(f"'{text}' has not the form {_GRAMMAR}")
    return matched


def _operands(side: str, column: str, label: str) -> Side:
    """Those of a side, with the column and the label of the claim's end where they say none themselves."""
    matches = filter(None, map(_OPERAND.fullmatch, side.split(_MINUS)))
    return tuple(Operand(m["row"], m["column"] or column, m["at"] or m["at_end"] or label) for m in matches)


class Claims(Settings):
    """What a study is to prove, by what it is about, and what it says besides; one to three are judged (Holm)."""

    method: list[str] = Field(default_factory=list, description="judged: a method is better than another")
    part: list[str] = Field(default_factory=list, description="judged: what a part of a method does; ablations")
    setting: list[str] = Field(
        default_factory=list,
        description="judged: what no method decides; more rounds or data, skew by construction, a ceiling over a floor",
    )
    secondary: list[str] = Field(
        default_factory=list, description="statements that are shown as differences with intervals, without verdict"
    )

    @model_validator(mode="after")
    def _one_to_three(self) -> Self:
        if self.secondary and not self.to_judge:
            raise ValueError("method, part, setting: there is none; name the statement for which the study is run")
        if len(self.to_judge) > 3:
            raise ValueError(f"method, part, setting: {len(self.to_judge)} are judged; name three at most, in all")
        return self

    @property
    def to_judge(self) -> list[Claim]:
        return [replace(Claim.parse(text), kind=kind) for kind in KINDS for text in getattr(self, kind)]

    @property
    def to_show(self) -> list[Claim]:
        return list(map(Claim.parse, self.secondary))


Verdict = Literal["held", "contradicted", "open", "not run"]

_LEVEL = 0.05
FEWEST_TUNING_SEEDS = 3
"""A row that was tuned on fewer is no ground for a verdict."""


@dataclass(frozen=True)
class Judgement:
    """A claim with what the seeds say of it.

    Attributes:
        claim: at one point, or over all.
        sample: left against right by seed; None where no seed has both.
        p: of the two-sided paired test, adjusted for all claims of the family (Holm); NaN where a seed is missing.
        verdict: held or contradicted where p is below the level.
        why: it is open all the same.
    """

    claim: Claim
    sample: Sample | None
    p: float
    verdict: Verdict
    why: str = ""


@dataclass(frozen=True)
class Allowance:
    """What the losing side of a claim is allowed, as its settings were chosen by a few noisy runs.

    Attributes:
        slack: that it may lack, in the unit of the column.
        doubt: standard error of what was chosen.
    """

    slack: float = 0.0
    doubt: float = 0.0


def judge(
    claims: Sequence[Claim],
    samples: Sequence[Sample | None],
    seeds: Sequence[int],
    allowances: Sequence[Allowance] | None = None,
) -> list[Judgement]:
    """Judge claims as one family, each by its left against right over the study's seeds, beyond its allowance.

    Nothing is decided on fewer than five ``seeds``, or where one of them is missing: nobody stops where it suits.
    P-values are adjusted over all claims (Holm 1979), also those that were not run, so that running a part changes no
    verdict.
    """
    shown = [None if sample is None else claim.towards(sample) for claim, sample in zip(claims, samples, strict=True)]
    allowed = allowances or [Allowance()] * len(claims)
    adjusted = holm(
        [
            _p(sample, own) if sample and _is_complete(sample, seeds) else math.nan
            for sample, own in zip(shown, allowed, strict=True)
        ]
    )
    return [
        Judgement(claim, sample, p, _verdict(towards, p))
        for claim, sample, towards, p in zip(claims, samples, shown, adjusted, strict=True)
    ]


def _p(sample: Sample, allowed: Allowance) -> float:
    return sample.p if isinstance(sample, PairedSpreads) else sample.p_beyond(allowed.slack, allowed.doubt)


def _is_complete(sample: Sample, seeds: Sequence[int]) -> bool:
    return len(seeds) >= FEWEST_SEEDS and {*seeds} == {*sample.seeds}


def _verdict(towards: Sample | None, p: float) -> Verdict:
    if towards is None:
        return "not run"
    if not p < _LEVEL:
        return "open"
    return "held" if towards.is_above else "contradicted"
