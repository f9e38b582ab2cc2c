"""Verdicts on claims: paired tests over seeds at one or two looks, adjusted for all claims of a family."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

from polyfed.lab.studies.claims import Claim
from polyfed.reporting.statistics import FEWEST_SEEDS, Sample, holm

Verdict = Literal["held", "contradicted", "open", "not run"]
Looks = Sequence[Sequence[int]]
"""The seeds at which a claim is judged: of the first look, then all of the second one; each with enough seeds."""

_LEVEL = 0.05
_MOST_SEEDS = 1000


@dataclass(frozen=True)
class Judgement:
    """A claim with what the seeds say of it.

    Attributes:
        claim: at one point, or over all.
        sample: left against right by seed, of all seeds that were run; None where no seed has both.
        p: of the two-sided paired test at the look that says most, times the number of looks, adjusted for all claims
            of the family (Holm); NaN before the first look is complete.
        verdict: held or contradicted where p is below the level.
        enough: computes ``seeds_to_decide``.
    """

    claim: Claim
    sample: Sample | None
    p: float
    verdict: Verdict
    enough: Callable[[], int | None] = field(repr=False, compare=False)

    @property
    def seeds_to_decide(self) -> int | None:
        """With how many seeds of all claims, more than were run, at their estimates and spreads, the test would decide.

        None where it has decided, or a thousand would not.
        """
        return self.enough() if self.verdict == "open" else None


@dataclass(frozen=True)
class _Case:
    """A claim on its way to the verdict."""

    claim: Claim
    sample: Sample | None
    looks: Looks

    @cached_property
    def shown(self) -> Sample | None:
        """Above where the claim holds; of all seeds."""
        return None if self.sample is None else self.claim.towards(self.sample)

    @cached_property
    def best(self) -> Sample | None:
        """The same at the complete look with the smallest p; None before there is one."""
        if self.shown is None:
            return None
        complete = [self.shown.of(look) for look in self.looks if set(look) <= set(self.shown.seeds)]
        return min(complete, key=lambda sample: sample.p_with(len(sample.seeds)), default=None)

    @property
    def p(self) -> float:
        """Each look has its share of the level (Bonferroni): valid also where the study stops at the first."""
        return math.nan if self.best is None else self.with_looks(self.best, len(self.best.seeds))

    def p_with(self, seeds: int) -> float:
        """What p would be with so many seeds, or those that were run where they are more."""
        return math.nan if self.shown is None else self.with_looks(self.shown, max(seeds, len(self.shown.seeds)))

    def with_looks(self, sample: Sample, seeds: int) -> float:
        return min(1.0, max(1, len(self.looks)) * sample.p_with(seeds))

    def verdict(self, adjusted: float) -> Verdict:
        if self.shown is None:
            return "not run"
        if self.best is None or not adjusted < _LEVEL:
            return "open"
        return "held" if self.best.is_above else "contradicted"


def judge(claims: Sequence[Claim], samples: Sequence[Sample | None], looks: Looks) -> list[Judgement]:
    """Judge claims as one family, each by its left against right over seeds.

    A look that lacks a seed is none: nobody stops where it suits. Two looks halve the level of each, which keeps it
    whatever decides whether the second one is made. P-values are adjusted over all claims (Holm 1979), also those that
    were not run, so that running a part changes no verdict.
    """
    cases = [_Case(claim, sample, looks) for claim, sample in zip(claims, samples, strict=True)]
    adjusted = holm([case.p for case in cases])
    return [
        Judgement(case.claim, case.sample, p, case.verdict(p), partial(_enough, cases, number))
        for number, (case, p) in enumerate(zip(cases, adjusted, strict=True))
    ]


def _enough(cases: Sequence[_Case], number: int) -> int | None:
    """Fewest seeds, more than were run, with which the adjusted test of a claim would decide."""
    shown = cases[number].shown
    assert shown is not None
    counts = range(max(FEWEST_SEEDS, len(shown.seeds) + 1), _MOST_SEEDS + 1)

    def is_decided(seeds: int) -> bool:
        return holm([case.p_with(seeds) for case in cases])[number] < _LEVEL

    place = bisect(counts, False, key=is_decided)  # the more seeds, the smaller every p
    return counts[place] if place < len(counts) else None
