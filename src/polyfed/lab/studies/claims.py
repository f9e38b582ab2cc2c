"""Claims: statements about the cells of a study, and verdicts on them by one paired test over seeds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from pydantic import Field, model_validator

from polyfed.core.settings import Settings
from polyfed.reporting.statistics import FEWEST_SEEDS, Comparison, PairedSample, Verdict, compared

Kind = Literal["method", "part", "setting"]
"""Subject of a judged claim."""

KINDS: tuple[Kind, ...] = ("method", "part", "setting")

ALL = "all"
"""Label of the mean over all points of the axes at which every row of a claim is run."""

_CLAIM = re.compile(r"(?P<left>.+?) (?P<sign>[><]) (?P<right>.+?)")
_OPERAND = re.compile(r"(?P<row>.*?)(?: at (?P<at>.+?))?(?: on (?P<column>.+?)(?: at (?P<at_end>.+?))?)?")
_MINUS = " - "
_GRAMMAR = "'SIDE > SIDE on COLUMN [at LABEL]'; a SIDE is ROW [at LABEL] [on COLUMN], or the difference of two such"


@dataclass(frozen=True)
class Operand:
    """A cell over all its seeds.

    Attributes:
        row: Row of the cell.
        column: Column of the figure.
        label: Label of the point; ``ALL``: the mean over points; empty where the claim names none.
    """

    row: str
    column: str
    label: str = ""


Side = tuple[Operand, ...]
"""One operand, or two: the first minus the second."""


@dataclass(frozen=True)
class Claim:
    """``SIDE > SIDE on COLUMN [at LABEL]``; column and label at the end are those of every row without.

    Attributes:
        text: The claim as written.
        left, right: The two sides compared.
        sign: ">" or "<".
        kind: Subject of a judged claim.
    """

    text: str
    left: Side
    right: Side
    sign: str
    kind: Kind | None = None

    @classmethod
    def parse(cls, text: str) -> Claim:
        """Parse a claim's text.

        Raises:
            ValueError: The text has another form.
        """
        matched = _matched(_CLAIM, text.strip(), text)
        end = _matched(_OPERAND, matched["right"].split(_MINUS)[-1], text)
        sides = [matched["left"], matched["right"]]
        left, right = (_operands(side, end["column"] or "", end["at_end"] or "") for side in sides)
        claim = cls(text, left, right, matched["sign"])
        claim._check()
        return claim

    def _check(self) -> None:
        if not all(operand.row and operand.column for operand in self.operands) or max(map(len, self.sides)) > 2:
            raise ValueError(f"'{self.text}' has not the form {_GRAMMAR}")
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
        """Labels of its points; empty for rows without one."""
        return {operand.label for operand in self.operands}

    @property
    def title(self) -> str:
        """The text, with the point of evaluation if the text has none."""
        given = Claim.parse(self.text).operands
        labels = [own.label for own, written in zip(self.operands, given, strict=True) if own.label != written.label]
        return f"{self.text} ({labels[0]})" if labels else self.text

    def at(self, label: str) -> Claim:
        """The claim with a point for operands without one."""
        left, right = (tuple(replace(operand, label=operand.label or label) for operand in side) for side in self.sides)
        return replace(self, left=left, right=right)

    def is_seen(self, verdict: Verdict) -> bool:
        """True if a verdict on left against right agrees with the claim."""
        return verdict == ("above" if self.sign == ">" else "below")


def _matched(form: re.Pattern[str], part: str, text: str) -> re.Match[str]:
    if (matched := form.fullmatch(part)) is None:
        raise ValueError(f"'{text}' has not the form {_GRAMMAR}")
    return matched


def _operands(side: str, column: str, label: str) -> Side:
    """Operands of a side, with the column and the label at the claim's end as defaults."""
    matches = filter(None, map(_OPERAND.fullmatch, side.split(_MINUS)))
    return tuple(Operand(m["row"], m["column"] or column, m["at"] or m["at_end"] or label) for m in matches)


MOST_JUDGED = 2


class Claims(Settings):
    """Statements that a study decides, a primary one and at most one more, and differences shown with them."""

    method: list[str] = Field(default_factory=list, description="judged: a method is better than another")
    part: list[str] = Field(default_factory=list, description="judged: effect of a part of a method; ablations")
    setting: list[str] = Field(
        default_factory=list,
        description="judged: independent of any method; more rounds or data, skew, a ceiling over a floor",
    )
    secondary: list[str] = Field(
        default_factory=list, description="statements that are shown as differences with intervals, without verdict"
    )
    more_seeds: int = Field(
        default=0, ge=0, description="number of additional seeds for the rows of an undecided judged claim"
    )

    @model_validator(mode="after")
    def _one_or_two(self) -> Self:
        if self.secondary and not self.to_judge:
            raise ValueError("method, part, setting: all are empty; name the statement for which the study is run")
        if len(self.to_judge) > MOST_JUDGED:
            raise ValueError(
                f"method, part, setting: {len(self.to_judge)} are judged; name the primary claim and at most one more, "
                "and the others under secondary"
            )
        return self

    @property
    def to_judge(self) -> list[Claim]:
        """Judged claims, the primary one first."""
        return [replace(Claim.parse(text), kind=kind) for kind in KINDS for text in getattr(self, kind)]

    @property
    def to_show(self) -> list[Claim]:
        return list(map(Claim.parse, self.secondary))


@dataclass(frozen=True)
class Judgement:
    """A claim with its verdict.

    Attributes:
        claim: At one point, or over all.
        sample: Left against right by seed, as far as the verdict reads it; None where no seed has both.
        effect: Smallest difference that matters, in the unit of the column.
        comparison: Estimate, interval, p and verdict; None where no seed has both, or a single one.
        why: Reason why nothing is decided before any test.
        is_judged: False for a difference that is only shown.
    """

    claim: Claim
    sample: PairedSample | None
    effect: float
    comparison: Comparison | None
    why: str = ""
    is_judged: bool = True

    @property
    def verdict(self) -> Verdict | Literal["not run"]:
        if self.sample is None:
            return "not run"
        return "undecided" if self.why or self.comparison is None else self.comparison.verdict

    @property
    def tested(self) -> tuple[float, float, float]:
        """Interval and p of the test; NaN of exact figures, and p where nothing is decided before any test."""
        if self.comparison is None or (self.sample and self.sample.is_exact):
            return math.nan, math.nan, math.nan
        return *self.comparison.interval, math.nan if self.why else self.comparison.p

    @property
    def is_seen(self) -> bool:
        """True if the verdict agrees with the claim."""
        return self.verdict != "not run" and self.claim.is_seen(self.verdict)

    @property
    def in_words(self) -> str:
        """``no difference of 1``, ``undecided (12 seeds would do)``; empty for a claim that is not judged."""
        if not self.is_judged:
            return ""
        if self.verdict == "no difference":
            return f"no difference of {self.effect:g}"
        if self.verdict != "undecided":
            return self.verdict
        needed = self.comparison and self.comparison.needed
        why = self.why or (f"{needed} seeds would do" if needed else "")
        return f"undecided ({why})" if why else "undecided"


def judge(
    claims: Sequence[Claim],
    samples: Sequence[PairedSample | None],
    effects: Sequence[float],
    looks: Sequence[Sequence[int]],
) -> list[Judgement]:
    """Judge claims as one family, each by its left against right over the seeds of the first look that decides it.

    The level of 0.05 is shared by all claims, run or not, and by all looks at them (Bonferroni). Nothing is decided
    where a seed of a look is missing, or on fewer than five.

    Args:
        claims: Claims of a study.
        samples: Left against right of each claim; None where no seed has both.
        effects: Smallest difference that matters, for each claim.
        looks: Seeds of each look at the table, those of earlier looks included.
    """
    tests = len(claims) * len(looks)
    return [_judged(*one, looks, tests) for one in zip(claims, samples, effects, strict=True)]


def _judged(
    claim: Claim, sample: PairedSample | None, effect: float, looks: Sequence[Sequence[int]], tests: int
) -> Judgement:
    if sample is None:
        return Judgement(claim, None, effect, None)
    if why := _lacking(sample, looks[0]):
        return Judgement(claim, sample, effect, compared(sample, effect, tests), why)
    items = []
    for look in looks:
        if not _lacking(sample, look):
            own = sample.within(look)
            items.append(Judgement(claim, own, effect, compared(own, effect, tests)))
    return next((item for item in items if item.verdict != "undecided"), items[-1])


def _lacking(sample: PairedSample, look: Sequence[int]) -> str:
    """Reason why a look cannot decide."""
    if len(look) < FEWEST_SEEDS:
        return f"fewer than {FEWEST_SEEDS} seeds"
    known = len({*look} & {*sample.seeds})
    return f"{known} of {len(look)} seeds" if known < len(look) else ""
