"""Paired samples over seeds: mean, spread, intervals, tests, and how many seeds would tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
FEWEST_SEEDS = 3
"""Below these a difference is no claim."""

_MOST_SEEDS = 1000


@dataclass(frozen=True)
class PairedSample:
    """Differences between two configurations, one a seed.

    Attributes:
        by_seed: seed -> finite difference; at least one.
    """

    by_seed: Mapping[int, float]

    @property
    def values(self) -> list[float]:
        """The differences."""
        return list(self.by_seed.values())

    @property
    def mean(self) -> float:
        """Mean difference."""
        return fmean(self.values)

    @property
    def std(self) -> float:
        """Sample standard deviation; NaN of a single one."""
        return stdev(self.values) if len(self.values) > 1 else math.nan

    @property
    def smallest(self) -> float:
        """The lowest difference."""
        return min(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the mean: mean -+ t(n - 1, 0.975) std / sqrt(n); NaN of a single difference."""
        count = len(self.values)
        reach = _quantile(count) * self.std / math.sqrt(count) if count > 1 else math.nan
        return self.mean - reach, self.mean + reach

    @property
    def p(self) -> float:
        """Of Student's two-sided test that the mean is 0; NaN of a single difference.

        Differences that are all the same leave no doubt: 0, or 1 where they are 0.
        """
        from scipy.stats import t

        count = len(self.values)
        if count < 2:
            return math.nan
        if self.std == 0:
            return float(self.mean == 0)
        return float(2 * t.sf(abs(self.mean) / (self.std / math.sqrt(count)), count - 1))

    def seeds_to_decide(self) -> int | None:
        """Fewest seeds with which, at this mean and spread, the 95 % interval leaves 0 out; None: over a thousand."""
        if math.isnan(self.std):
            return None
        counts = range(FEWEST_SEEDS, _MOST_SEEDS + 1)
        return next((n for n in counts if _quantile(n) * self.std / math.sqrt(n) < abs(self.mean)), None)


def _quantile(count: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, count - 1))


def holm(values: Sequence[float]) -> list[float]:
    """P-values adjusted so that the chance of any false rejection stays below the level (Holm 1979); NaN stays NaN."""
    order = sorted((number for number, p in enumerate(values) if not math.isnan(p)), key=values.__getitem__)
    adjusted, highest = [math.nan] * len(values), 0.0
    for place, number in enumerate(order):
        highest = max(highest, min(1.0, values[number] * (len(order) - place)))
        adjusted[number] = highest
    return adjusted
