"""Paired samples over seeds: means, spreads, intervals, and the one test that gives verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from statistics import fmean, pstdev, stdev
from typing import Literal, TypeVar

from polyfed.core.distributions import LEVEL, student_beyond, student_reach

FEWEST_SEEDS = 5
"""Fewer seeds prove nothing."""

MOST_DRAWN = 1e100
"""Magnitude beyond which values are treated as infinite: sums and squares must stay finite."""

_Key = TypeVar("_Key")
_NOISE = 1e-9  # of the largest difference: closer ones differ by rounding of floats


def finite_values(values: Mapping[_Key, float]) -> dict[_Key, float]:
    """Values that can be drawn: neither NaN nor beyond ``MOST_DRAWN``."""
    return {key: value for key, value in values.items() if abs(value) <= MOST_DRAWN}


def finite_mean(values: Iterable[float]) -> float:
    """Mean of one or more finite values; NaN if their sum overflows."""
    try:
        return fmean(values)
    except OverflowError:
        return math.nan


def spread_of(values: Iterable[float], *, sample: bool = True) -> float:
    """Standard deviation of finite values, of a sample or of a population; NaN for too few, or if it overflows."""
    known = list(values)
    if len(known) < 1 + sample:
        return math.nan
    try:
        return stdev(known) if sample else pstdev(known)
    except OverflowError:
        return math.nan


def values_by_round(series: Iterable[Mapping[int, float]], *, carry: bool) -> dict[int, list[float]]:
    """Round -> values of the series that have one, ascending; with ``carry`` their latest values."""
    finite = [finite_values(values) for values in series]
    by_round: dict[int, list[float]] = {}
    latest: dict[int, float] = {}
    for number in sorted({number for values in finite for number in values}):
        here = {place: values[number] for place, values in enumerate(finite) if number in values}
        latest = {**latest, **here} if carry else here
        by_round[number] = list(latest.values())
    return by_round


@dataclass(frozen=True)
class PairedSample:
    """Differences between two configurations, one per seed.

    Attributes:
        by_seed: Seed -> finite difference; at least one.
        figures: Seed -> the two figures, whose gaps show their step; empty to use the gaps of the differences.
        is_exact: True if no seed can change the figures, as a count of operations: then no test is needed.
    """

    by_seed: Mapping[int, float]
    figures: Mapping[int, tuple[float, float]] = field(default_factory=dict, kw_only=True)
    is_exact: bool = field(default=False, kw_only=True)

    @classmethod
    def between(cls, left: Mapping[int, float], right: Mapping[int, float]) -> PairedSample | None:
        """Left minus right for common seeds; None without common seeds."""
        figures = {seed: (left[seed], right[seed]) for seed in left if seed in right}
        return cls({seed: own - other for seed, (own, other) in figures.items()}, figures=figures) if figures else None

    @property
    def values(self) -> list[float]:
        return list(self.by_seed.values())

    @property
    def seeds(self) -> list[int]:
        return list(self.by_seed)

    @property
    def mean(self) -> float:
        return finite_mean(self.values)

    @property
    def std(self) -> float:
        """Sample standard deviation; NaN for a single difference."""
        return spread_of(self.values)

    @property
    def spread(self) -> float:
        """Standard deviation of tests and intervals; NaN for a single difference.

        Figures of n test items move in steps of 100 / n, so that equal differences have a hidden spread.
        A figure that is rounded to a step h has a variance of h^2 / 12 (Sheppard 1898), a difference of two of them
        h^2 / 6, which the variance is at least.
        """
        return max(self.std, self.step / math.sqrt(6)) if len(self.values) > 1 else math.nan

    @property
    def step(self) -> float:
        """Step of the figures: the smallest gap among them, or among the differences and 0."""
        return _step(chain(*self.figures.values()) if self.figures else [0.0, *self.values])

    @property
    def smallest(self) -> float:
        return min(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the mean: mean -+ t(n - 1, 0.975) spread / sqrt(n); NaN if single or exact."""
        return self.interval_at(LEVEL)

    def interval_at(self, level: float) -> tuple[float, float]:
        """Confidence interval of the mean at another level."""
        count = 1 if self.is_exact else len(self.values)
        reach = student_reach(count - 1, level) * self.spread / math.sqrt(count) if count > 1 else math.nan
        return self.mean - reach, self.mean + reach

    @property
    def p(self) -> float:
        """P-value of Student's two-sided test that the mean is 0; 1 without any spread, NaN for a single difference.

        For exact figures 0, unless they are equal.
        """
        if self.is_exact:
            return float(not self.mean)
        if not self.mean * self.spread:
            return 1.0
        return student_beyond(abs(self.mean) * math.sqrt(len(self.values)) / self.spread, len(self.values) - 1)

    def within(self, seeds: Iterable[int]) -> PairedSample:
        """Differences of some seeds."""
        own = [seed for seed in self.by_seed if seed in {*seeds}]
        figures = {seed: self.figures[seed] for seed in own if seed in self.figures}
        return replace(self, by_seed={seed: self.by_seed[seed] for seed in own}, figures=figures)


def _step(values: Iterable[float]) -> float:
    """The smallest gap between values, beyond rounding; 0 if there is none."""
    ordered = sorted({*values})
    noise = _NOISE * max(map(abs, ordered))
    return min((high - low for low, high in pairwise(ordered) if high - low > noise), default=0.0)


Verdict = Literal["above", "below", "no difference", "undecided"]

_SURE = 1.2816  # standard errors that a mean exceeds in one of ten draws
_MOST_SEEDS = 1000


@dataclass(frozen=True)
class Comparison:
    """Left against right, by one test: the interval alone decides the verdict.

    Attributes:
        estimate: Mean difference.
        interval: Confidence interval at level 1 - 0.05 / tests.
        p: P-value of the two-sided test, times the number of tests; at most 1.
        verdict: above or below if the interval excludes no difference; no difference if it lies within the smallest
            effect on either side; else undecided.
        needed: Seeds with which the test would decide in nine of ten tables if estimate and spread stay as they are;
            None where it decides already, or the number is unknown.
    """

    estimate: float
    interval: tuple[float, float]
    p: float
    verdict: Verdict
    needed: int | None = None


def compared(sample: PairedSample, effect: float, tests: int = 1) -> Comparison:
    """Compare left with right by the paired t-test, and by two one-sided tests whether they are equivalent.

    The level of 0.05 is shared by all ``tests`` of a family (Bonferroni), so that estimate, interval, p and verdict
    always agree.

    Args:
        sample: Left minus right, by seed.
        effect: Smallest difference that matters, in the unit of the figures; less does not matter.
        tests: Number of tests that share the level: claims of a table times looks at it.
    """
    level = (1 - LEVEL) / tests
    p = min(1.0, sample.p * tests)
    low, high = (sample.mean,) * 2 if sample.is_exact else sample.interval_at(1 - level)
    verdict: Verdict = "undecided"
    if -effect < low <= high < effect or (sample.is_exact and not sample.mean):
        verdict = "no difference"
    elif low > 0 or high < 0:
        verdict = "above" if low > 0 else "below"
    needed = _needed(sample, effect, 1 - level) if verdict == "undecided" else None
    return Comparison(sample.mean, (low, high), p, verdict, needed)


def _needed(sample: PairedSample, effect: float, level: float) -> int | None:
    """Seeds for which half the interval plus the error of the mean excludes 0 or the smallest effect."""
    room = max(abs(sample.mean), effect - abs(sample.mean))
    if math.isnan(sample.spread) or room <= 0:
        return None
    more = range(len(sample.values) + 1, _MOST_SEEDS)
    reaches = ((n, (student_reach(n - 1, level) + _SURE) / math.sqrt(n)) for n in more)
    return next((n for n, reach in reaches if reach * sample.spread <= room), None)
