"""How well scores tell two kinds of things apart, with intervals, and what a figure says in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

LEVEL = 0.95
FALSE_POSITIVES = 0.01
_DRAWS = 1000

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A figure, and the interval that holds it with a confidence of 95 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Discrimination:
    """How well scores tell members from others; chance has an AUC of 0.5 and a rate of 0.01.

    Each score is of an item of its own: intervals take them as independent.

    Attributes:
        auc: area under the curve of true over false positives.
        rate: share of members that are told at 1 % false positives.
        members, others: how many there are.
    """

    auc: Interval
    rate: Interval
    members: int
    others: int

    @classmethod
    def of(cls, members: Scores, others: Scores, seed: int) -> Discrimination:
        auc = Interval(area(members, others), *bootstrapped(members, others, seed))
        told = int((members > threshold(others)).sum())
        rate = Interval(told / len(members), *_rates(members, others, seed))
        return cls(auc, rate, len(members), len(others))

    def to_json(self) -> dict[str, object]:
        intervals = {"auc": dict(vars(self.auc)), "tpr_at_1_percent": dict(vars(self.rate))}
        return {**intervals, "members": self.members, "others": self.others}


def area(members: Scores, others: Scores) -> float:
    ranks = rankdata(np.concatenate([members, others]))
    wins = ranks[: len(members)].sum() - len(members) * (len(members) + 1) / 2
    return float(wins / (len(members) * len(others)))


def threshold(others: Scores) -> float:
    """The lowest score above which at most 1 % of the others are."""
    allowed = math.floor(FALSE_POSITIVES * len(others))
    return float(np.sort(others)[len(others) - 1 - allowed])


def bootstrapped(members: Scores, others: Scores, seed: int) -> tuple[float, float]:
    draws = np.random.default_rng(seed)
    areas = [area(draws.choice(members, len(members)), draws.choice(others, len(others))) for _ in range(_DRAWS)]
    low, high = np.quantile(areas, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _rates(members: Scores, others: Scores, seed: int) -> tuple[float, float]:
    """Percentiles of the rate, with the threshold as uncertain as it is.

    Of n others Binomial(n, 1 %) are above the true threshold, which lies between two neighbours: the low end goes by
    the higher of them, the high end by the lower, each with Jeffreys' posterior of the rate. Plain resampling covers
    79 % at 100 items, as the threshold is among the highest of the others.
    """
    draws, count = np.random.default_rng(seed), len(members)
    ordered = np.concatenate([[np.inf], np.sort(others)[::-1], [-np.inf]])
    above = np.append(count - np.searchsorted(np.sort(members), ordered[:-1], side="right"), count)
    places = draws.binomial(len(others), FALSE_POSITIVES, _DRAWS)
    ends = []
    for told, level in ((above[places], (1 - LEVEL) / 2), (above[places + 1], (1 + LEVEL) / 2)):
        rates = draws.beta(told + 0.5, count - told + 0.5)
        rates[told == (0 if level < 0.5 else count)] = 0 if level < 0.5 else 1  # no rate is beyond
        ends.append(float(np.quantile(rates, level)))
    return ends[0], ends[1]


def leak_verdict(auc: Interval, *, is_protected: bool) -> str:
    """What an area says; an attack that fails where nothing protects is no measurement."""
    if auc.low > 0.5:
        return "much" if auc.value >= 0.75 else "some" if auc.value >= 0.6 else "little"
    return "nothing found" if is_protected else "attack too weak"


@dataclass(frozen=True)
class Finding:
    """What one attack found on one thing.

    Attributes:
        on: what was attacked.
        attack: by what.
        says: the verdict, or why the attack does not apply.
        figures: for file and table; none where it does not apply.
    """

    on: str
    attack: str
    says: str
    figures: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        about = {"on": self.on, "attack": self.attack}
        return {**about, **self.figures, "verdict": self.says} if self.figures else {**about, "reason": self.says}
