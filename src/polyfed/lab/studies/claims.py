"""Claims: statements on the cells of a study, judged by paired differences over seeds."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from polyfed.reporting.statistics import FEWEST_SEEDS, PairedSample, holm

Operand = tuple[str, str]
"""A row, and the label of a point of the axes; an empty label is that of the claim."""

Verdict = Literal["held", "contradicted", "undecided", "not run"]

_FORM = re.compile(
    r"(?P<left>.+?) (?P<sign>>=|<=|>|<) (?P<right>.+?) on (?P<column>.+?)(?: at (?P<at>.+?))?(?: by (?P<by>\d*\.?\d+))?"
)
_LEVEL = 0.05
_MOST_SEEDS = 1000


@dataclass(frozen=True)
class Claim:
    """``ROW [at LABEL] > ROW [at LABEL] on COLUMN [at LABEL] [by MARGIN]``.

    ``A > B by m`` says that A is above B by more than m; ``A >= B by m`` that A is not below B by more than m.

    Attributes:
        text: as it is written.
        left, right: what is compared; where only the claim has a label, it is that of both.
        sign: one of > < >= <=.
        column: figure.
        margin: m, 0 unless it is given.
    """

    text: str
    left: Operand
    right: Operand
    sign: str
    column: str
    margin: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Claim:
        """From its text.

        Raises:
            ValueError: it has another form.
        """
        matched = _FORM.fullmatch(text.strip())
        if matched is None:
            raise ValueError(f"claims: '{text}' has not the form 'ROW > ROW on COLUMN [at LABEL] [by MARGIN]'")
        at = matched["at"] or ""
        left, right = (_operand(matched[side], at) for side in ("left", "right"))
        return cls(text, left, right, matched["sign"], matched["column"], float(matched["by"] or 0))

    def at(self, label: str) -> Claim:
        """The claim at a point, where it does not say at which."""
        left, right = ((row, own or label) for row, own in (self.left, self.right))
        return Claim(self.text, left, right, self.sign, self.column, self.margin)

    def excess(self, difference: float) -> float:
        """What must be above 0 for the claim, of left minus right: by how much more than the margin."""
        ahead = difference if self.sign.startswith(">") else -difference
        return ahead + self.margin if self.sign.endswith("=") else ahead - self.margin


def _operand(text: str, at: str) -> Operand:
    row, sign, label = text.partition(" at ")
    return row, label if sign else at


@dataclass(frozen=True)
class Judgement:
    """A claim with what the seeds say of it.

    Attributes:
        claim: at one point.
        sample: left minus right by seed, or None where no seed has both.
        excess: the same beyond the margin, towards the claim.
        p: of the two-sided paired t-test that ``excess`` is 0, adjusted for all claims (Holm); NaN below two seeds.
        seeds_to_decide: with how many seeds of all claims, at their means and spreads, the adjusted test would decide;
            None where it has decided, or a thousand would not.
    """

    claim: Claim
    sample: PairedSample | None
    excess: PairedSample | None
    p: float
    seeds_to_decide: int | None = None

    @property
    def verdict(self) -> Verdict:
        """Held or contradicted where the adjusted test rejects chance, and never on fewer than three seeds."""
        if self.excess is None:
            return "not run"
        if len(self.excess.values) < FEWEST_SEEDS or not self.p < _LEVEL:
            return "undecided"
        return "held" if self.excess.mean > 0 else "contradicted"


def judge(claims: Sequence[Claim], samples: Sequence[PairedSample | None]) -> list[Judgement]:
    """Judge the claims of a study, each by its left minus right over seeds.

    P-values are adjusted over all claims (Holm 1979), also those that were not run: which rows are run does not change
    the family.
    """
    excesses = [
        None if sample is None else PairedSample({seed: claim.excess(value) for seed, value in sample.by_seed.items()})
        for claim, sample in zip(claims, samples, strict=True)
    ]
    adjusted = holm([_p_with(excess, 0) for excess in excesses])
    enough = [_enough(excesses, number) for number in range(len(claims))]
    return [Judgement(*parts) for parts in zip(claims, samples, excesses, adjusted, enough, strict=True)]


def _p_with(excess: PairedSample | None, seeds: int) -> float:
    """With so many seeds, or those that there are where they are more; NaN where no seed was run."""
    return float("nan") if excess is None else excess.p_with(max(seeds, len(excess.values)))


def _enough(excesses: Sequence[PairedSample | None], number: int) -> int | None:
    """Fewest seeds with which the adjusted test of a claim would decide."""
    excess = excesses[number]

    def is_decided(seeds: int) -> bool:
        return holm([_p_with(other, seeds) for other in excesses])[number] < _LEVEL

    if excess is None or (len(excess.values) >= FEWEST_SEEDS and is_decided(0)):
        return None
    counts = range(max(FEWEST_SEEDS, len(excess.values) + 1), _MOST_SEEDS + 1)
    place = bisect(counts, False, key=is_decided)  # the more seeds, the smaller every p
    return counts[place] if place < len(counts) else None
