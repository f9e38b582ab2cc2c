"""What noise is worth: epsilon and delta of all that a client has sent, by dp-accounting."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from polyfed.core.extras import brought_by

EXTRA = "privacy"
_WEAK = 0.25  # noise over clip
_MOVES = {"replace": 2, "add_remove": 1}  # how far a sample moves a sum, in norms of one at most
_RELATIONS = {"replace": "REPLACE_ONE", "add_remove": "ADD_OR_REMOVE_ONE"}
_SLACK = 1e-6  # relative; noise that was calibrated to a budget must fit into it


Neighbours = Literal["replace", "add_remove"]
"""Between which data sets epsilon of DP-SGD is meant: one sample is another, or one is there or not."""


@dataclass(frozen=True)
class PrivacyCost:
    """What one release costs: Gaussian noise, ``steps`` times.

    Attributes:
        noise: standard deviation; without ``rate`` over the largest L2 distance of what any two data sets make of a
            reply, with it over the largest L2 norm of what one sample adds to a sum.
        rate: probability with which each sample takes part in a step of training, by Poisson sampling.
        steps: number of such mechanisms.

    Raises:
        ValueError: no mechanism has such noise, rate or number.
    """

    noise: float
    rate: float | None = None
    steps: int = 1

    def __post_init__(self) -> None:
        possible = 0 < self.noise < math.inf and (self.rate is None or 0 < self.rate <= 1)
        if not possible or type(self.steps) is not int or self.steps < 1:
            raise ValueError(f"noise {self.noise}, rate {self.rate}, steps {self.steps} cost nothing that is known")


def between_sets(samples: bool, neighbours: Neighbours) -> str:
    """Between which sets of a client's training data epsilon is meant, in words.

    Args:
        samples: whether it is of noise in training; of noise on replies there is one meaning.
        neighbours: of noise in training.
    """
    if not samples:
        return "any two sets of its size of training data"
    if neighbours == "replace":
        return "two sets of its size of training data, of which one has another sample in place of one"
    return "two sets of training data, of which one lacks a sample (to whoever does not know its size)"


def accounting() -> Any:
    """The package dp-accounting.

    Raises:
        ConfigError: it is not installed.
    """
    with brought_by(EXTRA):
        return importlib.import_module("dp_accounting")


def epsilon_of(costs: Iterable[PrivacyCost], delta: float, neighbours: Neighbours = "replace") -> float:
    """Epsilon at ``delta`` of all these releases together, each of which may depend on those before.

    Gaussian mechanisms compose exactly to one (Dong, Roth and Su, J. R. Stat. Soc. B 2022, Corollary 3.3), whose
    epsilon is that of Balle and Wang (ICML 2018); with sampled steps among them by privacy loss
    distributions. Where noise is weak, Renyi divergences bound it, or with ``replace`` what it is without sampling.

    Args:
        costs: of the releases.
        delta: at which.
        neighbours: with ``replace`` a sample moves a sum by twice its norm at most, with ``add_remove`` by its norm.
            What a reply costs is between any two data sets, whatever is said here.
    """
    counted: Counter[tuple[float, float | None]] = Counter()
    for cost in costs:
        counted[cost.noise, cost.rate] += cost.steps
    return _epsilon(frozenset(counted.items()), delta, neighbours)


_Counted = frozenset[tuple[tuple[float, float | None], int]]  # noise and rate, steps


@lru_cache(maxsize=4096)
def _epsilon(counted: _Counted, delta: float, neighbours: Neighbours) -> float:
    sampled = frozenset(((noise, rate), steps) for (noise, rate), steps in counted if rate is not None and rate < 1)
    # privacy losses of weak noise are too large to tabulate
    weak = any(noise < _WEAK for (noise, _), _ in sampled)
    if weak and neighbours == "replace":  # for which the accountant has no Renyi divergences of sampling
        sampled = frozenset()
    precision = _precision(counted - sampled, _MOVES[neighbours])
    if sampled:
        return _with_sampling(precision, sampled, delta, neighbours, weak=weak)
    return float(accounting().get_epsilon_gaussian(1 / math.sqrt(precision), delta)) if precision else 0.0


def _with_sampling(precision: float, sampled: _Counted, delta: float, neighbours: Neighbours, *, weak: bool) -> float:
    package = accounting()
    relation = package.NeighboringRelation[_RELATIONS[neighbours]]
    accountant = (_module("rdp").RdpAccountant if weak else _module("pld").PLDAccountant)(neighboring_relation=relation)
    if precision:  # the accountant takes noise over the norm of a sample here too
        accountant.compose(package.GaussianDpEvent(_MOVES[neighbours] / math.sqrt(precision)))
    for (noise, rate), steps in sorted(sampled):
        accountant.compose(package.PoissonSampledDpEvent(rate, package.GaussianDpEvent(noise)), steps)
    return float(accountant.get_epsilon(delta))


def _precision(counted: _Counted, moves: int) -> float:
    """1 / noise^2, over the distance, of the one mechanism that all without sampling are together."""
    distances = {True: 1, False: moves}
    return math.fsum(steps * (distances[rate is None] / noise) ** 2 for (noise, rate), steps in counted)


def _module(name: str) -> Any:
    return importlib.import_module(f"dp_accounting.{name}")


def fits(costs: Iterable[PrivacyCost], epsilon: float, delta: float, neighbours: Neighbours = "replace") -> bool:
    return epsilon_of(costs, delta, neighbours) <= epsilon * (1 + _SLACK)


def releases_within(
    cost: PrivacyCost, epsilon: float, delta: float, most: int, neighbours: Neighbours = "replace"
) -> int:
    """How many releases of that cost are within a budget, ``most`` at most."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits([cost] * middle, epsilon, delta, neighbours) else (low, middle - 1)
    return low


def noise_for(epsilon: float, delta: float, releases: int) -> float:
    """``PrivacyCost.noise`` at which so many replies are within a budget."""
    return float(accounting().get_sigma_gaussian(epsilon, delta)) * math.sqrt(releases)
