"""Epsilon against formulas that are worked by hand, and against the accountant itself."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.signal import fftconvolve
from scipy.stats import norm

dp_accounting = pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")

from polyfed.core.errors import ConfigError  # noqa: E402
from polyfed.privacy.accounting import (  # noqa: E402
    PrivacyCost,
    accounting,
    epsilon_of,
    fits,
    noise_for,
    releases_within,
)

PHI = NormalDist().cdf


def delta_of(noise: float, epsilon: float) -> float:
    """Balle and Wang 2018, Theorem 8, of sensitivity 1."""
    mu = 1 / noise
    return PHI(mu / 2 - epsilon / mu) - math.exp(epsilon) * PHI(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("noise", "releases"), [(1.0, 1), (2.0, 1), (4.0, 10), (20.0, 400)])
def test_epsilon_is_that_of_the_analytic_gaussian_mechanism(noise: float, releases: int) -> None:
    epsilon = epsilon_of([PrivacyCost(noise)] * releases, 1e-5)
    assert delta_of(noise / math.sqrt(releases), epsilon) == pytest.approx(1e-5, rel=1e-6)


def test_releases_of_several_kinds_compose_to_one() -> None:
    # 1/2^2 + 1/2^2 + 2/4^2 = 5/8: one mechanism of noise sqrt(8/5)
    costs = [PrivacyCost(2.0), PrivacyCost(4.0, steps=2), PrivacyCost(2.0)]
    assert epsilon_of(costs, 1e-6) == pytest.approx(epsilon_of([PrivacyCost(math.sqrt(8 / 5))], 1e-6))
    assert epsilon_of([], 1e-5) == 0


@pytest.mark.slow
def test_sampled_steps_are_those_of_the_accountant() -> None:
    accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.1))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 60))
    expected = accountant.get_epsilon(1e-5)
    assert epsilon_of([PrivacyCost(1.1, 0.05, 20)] * 3, 1e-5) == pytest.approx(expected, rel=1e-4)
    assert expected < epsilon_of([PrivacyCost(1.1, 1.0, 60)], 1e-5) / 3  # what sampling is worth


def test_weak_noise_is_bounded_by_moments_or_without_sampling() -> None:
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(0.1)), 4)
    weak = [PrivacyCost(0.1, 0.2, 4)]
    assert epsilon_of(weak, 1e-5, "add_remove") == pytest.approx(accountant.get_epsilon(1e-5))
    assert epsilon_of(weak, 1e-5) == epsilon_of([PrivacyCost(0.1, 1.0, 4)], 1e-5)


def test_without_sampling_a_replaced_sample_moves_a_sum_by_twice_the_clip_and_replies_are_as_they_are() -> None:
    full = PrivacyCost(1.0, 1.0)
    assert epsilon_of([full], 1e-5) == pytest.approx(epsilon_of([PrivacyCost(0.5)], 1e-5))
    assert epsilon_of([full], 1e-5, "add_remove") == pytest.approx(epsilon_of([PrivacyCost(1.0)], 1e-5))
    assert epsilon_of([PrivacyCost(1.0)], 1e-5) == epsilon_of([PrivacyCost(1.0)], 1e-5, "add_remove")
    # next to a step that costs next to nothing, the accountant takes a reply as it is
    both = [PrivacyCost(2.0), PrivacyCost(1e3, 0.1)]
    for epsilon in (epsilon_of(both, 1e-5, "replace"), epsilon_of(both, 1e-5, "add_remove")):
        assert epsilon == pytest.approx(epsilon_of([PrivacyCost(2.0)], 1e-5), rel=1e-5)


def least_epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """Epsilon of steps between a set with a sample at +clip and one with it at -clip, on a grid, rounded down.

    The loss log P/Q of P = (1 - q) N(0, s^2) + q N(1, s^2) and Q with -1, under P, rounded down to the grid, composes
    by convolution, so that epsilon is no more than the true one.
    """
    width, half = 5e-3, 40.0
    edges = np.linspace(-12 * noise - 1, 12 * noise + 1, 200_001)
    middle = (edges[1:] + edges[:-1]) / 2
    zero, plus, minus = (norm.pdf(middle, mean, noise) for mean in (0, 1, -1))
    p, q = (1 - rate) * zero + rate * plus, (1 - rate) * zero + rate * minus
    count = int(half / width)
    positions = np.clip(np.floor(np.log(p / q) / width) + count, 0, 2 * count).astype(int)
    power = np.bincount(positions, weights=p * (edges[1] - edges[0]), minlength=2 * count + 1)
    total, start, own, left = np.ones(1), 0, count, steps
    while left:
        if left & 1:
            total, start = fftconvolve(total, power), start + own
        power, own, left = fftconvolve(power, power), 2 * own, left >> 1
    losses = (np.arange(len(total)) - start) * width

    def beyond(epsilon: float) -> float:
        above = losses > epsilon
        return float((np.clip(total[above], 0, None) * -np.expm1(epsilon - losses[above])).sum()) - delta

    return float(brentq(beyond, 0.0, 50.0))


@pytest.mark.parametrize(
    ("noise", "replaced", "added"),
    [
        pytest.param(0.548, 23.12, 19.93, marks=pytest.mark.slow),
        pytest.param(0.834, 10.54, 7.99, marks=pytest.mark.slow),
        pytest.param(1.423, 4.91, 3.0, marks=pytest.mark.slow),
        (3.159, 1.95, 1.0),
    ],
)
def test_epsilon_of_a_replaced_sample_is_not_below_a_lower_bound(noise: float, replaced: float, added: float) -> None:
    costs = [PrivacyCost(noise, 0.1, 10)] * 6
    least = least_epsilon(noise, 0.1, 60, 1e-5)
    assert epsilon_of(costs, 1e-5) == pytest.approx(replaced, abs=0.01)
    assert 0.9 * epsilon_of(costs, 1e-5) < least <= epsilon_of(costs, 1e-5)
    assert epsilon_of(costs, 1e-5, "add_remove") == pytest.approx(added, abs=0.01)
    assert epsilon_of(costs, 1e-5, "add_remove") < least  # too little where the number of samples is known


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_no_mechanism_costs_what_cannot_be(value: float) -> None:
    for cost in ({"noise": value}, {"noise": 1.0, "rate": value}, {"noise": 1.0, "steps": value}):
        with pytest.raises(ValueError, match="are not a possible mechanism"):
            PrivacyCost(**cost)  # type: ignore[arg-type]


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 8.0, 20.0])
def test_noise_that_follows_from_a_budget_spends_it(epsilon: float) -> None:
    cost = PrivacyCost(noise_for(epsilon, 1e-5, 12))
    assert epsilon_of([cost] * 12, 1e-5) == pytest.approx(epsilon, rel=1e-5)
    assert fits([cost] * 12, epsilon, 1e-5)
    assert not fits([cost] * 13, epsilon, 1e-5)
    assert releases_within(cost, epsilon, 1e-5, 100) == 12
    assert releases_within(cost, epsilon, 1e-5, 5) == 5


def test_the_missing_accountant_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r'pip install "polyfed\[privacy\]"'):
        accounting()
