"""What noise is worth: epsilon and delta of all that a client has sent, by dp-accounting."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from polyfed.core.errors import ConfigError
from polyfed.core.extras import how_to_install

EXTRA = "privacy"
_WEAK = 0.25  # noise over sensitivity
_SLACK = 1e-6  # relative; noise that was calibrated to a budget must fit into it


@dataclass(frozen=True)
class PrivacyCost:
    """What one release costs: Gaussian noise of ``noise`` times the sensitivity, ``steps`` times.

    Attributes:
        noise: standard deviation over the largest L2 distance between what neighbouring data sets would send.
        rate: probability with which each sample takes part in a step, by Poisson sampling; 1: all always do.
        steps: number of such mechanisms.
    """

    noise: float
    rate: float = 1.0
    steps: int = 1


def accounting() -> Any:
    """The package dp-accounting.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("dp_accounting")
    except ModuleNotFoundError as error:
        raise ConfigError(f"privacy needs a package: {error}; {how_to_install(EXTRA)}") from error


def epsilon_of(costs: Iterable[PrivacyCost], delta: float) -> float:
    """Epsilon at ``delta`` of all these releases together, each of which may depend on those before.

    Gaussian mechanisms compose exactly to one (Dong, Roth and Su, J. R. Stat. Soc. B 2022, Corollary 3.3), whose
    epsilon is that of Balle and Wang (ICML 2018); with sampled steps among them by privacy loss
    distributions, or where noise is weak by Renyi divergences, which bound it.
    """
    counted: Counter[tuple[float, float]] = Counter()
    for cost in costs:
        counted[cost.noise, cost.rate] += cost.steps
    return _epsilon(tuple(sorted(counted.items())), delta)


@lru_cache(maxsize=4096)
def _epsilon(counted: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    whole = sum(steps / noise**2 for (noise, rate), steps in counted if rate >= 1)
    sampled = [(noise, rate, steps) for (noise, rate), steps in counted if rate < 1 and steps]
    if sampled:
        return _with_sampling(whole, sampled, delta)
    return float(accounting().get_epsilon_gaussian(1 / math.sqrt(whole), delta)) if whole else 0.0


def _with_sampling(whole: float, sampled: Sequence[tuple[float, float, int]], delta: float) -> float:
    """Epsilon of mechanisms (noise, rate, steps), and of those without sampling, whose precisions sum to ``whole``."""
    # privacy losses of weak noise are too large to tabulate; its epsilon is then bounded by Renyi divergences
    exact = min(noise for noise, _, _ in sampled) >= _WEAK
    accountant = (_module("pld").PLDAccountant if exact else _module("rdp").RdpAccountant)()
    package = accounting()
    if whole:
        accountant.compose(package.GaussianDpEvent(1 / math.sqrt(whole)))
    for noise, rate, steps in sampled:
        accountant.compose(package.PoissonSampledDpEvent(rate, package.GaussianDpEvent(noise)), steps)
    return float(accountant.get_epsilon(delta))


def _module(name: str) -> Any:
    return importlib.import_module(f"dp_accounting.{name}")


def fits(costs: Iterable[PrivacyCost], epsilon: float, delta: float) -> bool:
    """Whether releases are within a budget."""
    return epsilon_of(costs, delta) <= epsilon * (1 + _SLACK)


def releases_within(cost: PrivacyCost, epsilon: float, delta: float, most: int) -> int:
    """How many releases of that cost are within a budget, ``most`` at most."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits([cost] * middle, epsilon, delta) else (low, middle - 1)
    return low


def noise_for(epsilon: float, delta: float, releases: int) -> float:
    """``PrivacyCost.noise`` at which so many releases are within a budget."""
    return float(accounting().get_sigma_gaussian(epsilon, delta)) * math.sqrt(releases)
