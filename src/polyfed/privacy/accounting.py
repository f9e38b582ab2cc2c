"""Privacy accounting: epsilon and delta of all replies of a client, by dp-accounting."""

from __future__ import annotations

import importlib
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from polyfed.core.extras import brought_by

EXTRA = "privacy"
_WEAK = 0.25  # noise over clip
_MOVES = {"replace": 2, "add_remove": 1}  # largest change of a sum by one sample, in largest norms of a sample
_RELATIONS = {"replace": "REPLACE_ONE", "add_remove": "ADD_OR_REMOVE_ONE"}
_SLACK = 1e-6  # relative; noise that was calibrated to a budget must fit into it


Neighbours = Literal["replace", "add_remove"]
"""Data sets between which epsilon of DP-SGD is meant: one sample differs, or one is present or absent."""


@dataclass(frozen=True)
class PrivacyCost:
    """Cost of one release: Gaussian noise, ``steps`` times.

    Attributes:
        noise: Standard deviation over the sensitivity: without ``rate`` the largest L2 distance between the replies of
            any two data sets, with it the largest L2 norm of one sample's part of a sum.
        rate: Probability with which each sample takes part in a step of training, by Poisson sampling.
        steps: Number of such mechanisms.

    Raises:
        ValueError: such noise, rate or number is impossible.
    """

    noise: float
    rate: float | None = None
    steps: int = 1

    def __post_init__(self) -> None:
        possible = 0 < self.noise < math.inf and (self.rate is None or 0 < self.rate <= 1)
        if not possible or type(self.steps) is not int or self.steps < 1:
            raise ValueError(f"noise {self.noise}, rate {self.rate}, steps {self.steps} are not a possible mechanism")


def between_sets(samples: bool, neighbours: Neighbours) -> str:
    """Description of the sets of a client's training data between which epsilon is meant.

    Args:
        samples: True for noise in training; noise on replies has one meaning.
        neighbours: Neighbours of noise in training.
    """
    if not samples:
        return "any two sets of its size of training data"
    if neighbours == "replace":
        return "two sets of its size of training data, of which one has another sample in place of one"
    return "two sets of training data, of which one lacks a sample (for a reader who does not know its size)"


def accounting() -> Any:
    """The package dp-accounting.

    Raises:
        ConfigError: the package is missing.
    """
    with brought_by(EXTRA):
        return importlib.import_module("dp_accounting")


def epsilon_of(costs: Iterable[PrivacyCost], delta: float, neighbours: Neighbours = "replace") -> float:
    """Epsilon at ``delta`` of all these releases together, each of which may depend on those before.

    Gaussian mechanisms compose exactly to one (Dong, Roth and Su, J. R. Stat. Soc. B 2022, Corollary 3.3), whose
    epsilon is that of Balle and Wang (ICML 2018); with sampled steps among them, privacy loss distributions are
    composed. Where noise is weak, the bound is that of Renyi divergences, or with ``replace`` that without sampling.

    Args:
        costs: Cost of each release.
        delta: Delta of the guarantee.
        neighbours: With ``replace`` a sample moves a sum by at most twice its norm, with ``add_remove`` by its norm.
            The cost of a noisy reply is between any two data sets in either case.
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
    """1 / noise^2, over the distance, of the one mechanism to which all mechanisms without sampling compose."""
    distances = {True: 1, False: moves}
    return math.fsum(steps * (distances[rate is None] / noise) ** 2 for (noise, rate), steps in counted)


def _module(name: str) -> Any:
    return importlib.import_module(f"dp_accounting.{name}")


def fits(costs: Iterable[PrivacyCost], epsilon: float, delta: float, neighbours: Neighbours = "replace") -> bool:
    return epsilon_of(costs, delta, neighbours) <= epsilon * (1 + _SLACK)


def releases_within(
    cost: PrivacyCost, epsilon: float, delta: float, most: int, neighbours: Neighbours = "replace"
) -> int:
    """Number of releases of that cost within a budget, at most ``most``."""
    numbers = range(1, most + 1)
    return bisect_left(numbers, True, key=lambda number: not fits([cost] * number, epsilon, delta, neighbours))


def noise_for(epsilon: float, delta: float, releases: int) -> float:
    """``PrivacyCost.noise`` at which this number of replies is within a budget."""
    return float(accounting().get_sigma_gaussian(epsilon, delta)) * math.sqrt(releases)
