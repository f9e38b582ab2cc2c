"""Paired samples over seeds: mean, spread, intervals, and tests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean, pstdev, stdev
from typing import TypeVar

CONFIDENCE = 0.95
FEWEST_SEEDS = 3
"""Below these a difference is no claim."""

MOST_DRAWN = 1e100
"""Magnitude beyond which values are drawn no more than infinite ones are: sums and squares of them must be finite."""

_Key = TypeVar("_Key")
_NOISE = 1e-9  # of the largest difference: closer ones differ by rounding of floats


def finite_values(values: Mapping[_Key, float]) -> dict[_Key, float]:
    """The values that can be drawn: no NaN, and none beyond ``MOST_DRAWN``."""
    return {key: value for key, value in values.items() if abs(value) <= MOST_DRAWN}


def finite_mean(values: Iterable[float]) -> float:
    """The mean of one or more finite values; NaN where their sum is beyond what a float holds."""
    try:
        return fmean(values)
    except OverflowError:
        return math.nan


def spread_of(values: Iterable[float], *, sample: bool = True) -> float:
    """Standard deviation of finite values, of a sample or of all there are; NaN of too few, or beyond a float."""
    known = list(values)
    if len(known) < 1 + sample:
        return math.nan
    try:
        return stdev(known) if sample else pstdev(known)
    except OverflowError:
        return math.nan


@dataclass(frozen=True)
class PairedSample:
    """Differences between two configurations, one a seed.

    Attributes:
        by_seed: seed -> finite difference; at least one.
    """

    by_seed: Mapping[int, float]

    @property
    def values(self) -> list[float]:
        return list(self.by_seed.values())

    @cached_property
    def mean(self) -> float:
        return finite_mean(self.values)

    @property
    def std(self) -> float:
        """Sample standard deviation; NaN of a single one."""
        return spread_of(self.values)

    @cached_property
    def spread(self) -> float:
        """Standard deviation that tests and intervals go by; NaN of a single difference.

        Figures of n test items move in steps of 100 / n, so that equal differences have a spread that they do not show.
        A figure that is rounded to a step h has a variance of h^2 / 12 (Sheppard 1898), a difference of two of them
        h^2 / 6, which the variance is at least. The step is the smallest gap among the differences and 0.
        """
        values = sorted({0.0, *self.values})
        noise = _NOISE * max(map(abs, values))
        step = min((high - low for low, high in pairwise(values) if high - low > noise), default=0.0)
        return max(self.std, step / math.sqrt(6)) if len(self.values) > 1 else math.nan

    @property
    def smallest(self) -> float:
        return min(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the mean: mean -+ t(n - 1, 0.975) spread / sqrt(n); NaN of a single one."""
        from scipy.stats import t

        count = len(self.values)
        reach = (
            float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * self.spread / math.sqrt(count) if count > 1 else math.nan
        )
        return self.mean - reach, self.mean + reach

    @property
    def p(self) -> float:
        """Of Student's two-sided test that the mean is 0; NaN of a single difference."""
        return self.p_with(len(self.values))

    def p_with(self, seeds: int) -> float:
        """What ``p`` would be with so many seeds, at this mean and spread."""
        from scipy.special import stdtr  # a claim's number of seeds asks for many: scipy.stats takes 50 times as long

        if math.isnan(self.spread) or self.mean == 0:
            return math.nan if math.isnan(self.spread) else 1.0
        return float(2 * stdtr(seeds - 1, -abs(self.mean) / (self.spread / math.sqrt(seeds))))


def holm(values: Sequence[float]) -> list[float]:
    """P-values adjusted so that the chance of any false rejection stays below the level (Holm 1979).

    A test that has none (NaN) stays without, and counts as one of the family all the same.
    """
    order = sorted((number for number, p in enumerate(values) if not math.isnan(p)), key=values.__getitem__)
    adjusted, highest = [math.nan] * len(values), 0.0
    for place, number in enumerate(order):
        highest = max(highest, min(1.0, values[number] * (len(values) - place)))
        adjusted[number] = highest
    return adjusted
