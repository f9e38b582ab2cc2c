"""Epsilon against formulas that are worked by hand, and against the accountant itself."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest

dp_accounting = pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")

from polyfed.core.errors import ConfigError  # noqa: E402
from polyfed.federation.accounting import (  # noqa: E402
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


def test_sampled_steps_are_those_of_the_accountant() -> None:
    accountant = dp_accounting.pld.PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.1))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 60))
    expected = accountant.get_epsilon(1e-5)
    assert epsilon_of([PrivacyCost(1.1, 0.05, 20)] * 3, 1e-5) == pytest.approx(expected, rel=1e-4)
    assert expected < epsilon_of([PrivacyCost(1.1, steps=60)], 1e-5) / 3  # what sampling is worth


def test_weak_noise_is_bounded_by_moments() -> None:
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(0.1)), 4)
    assert epsilon_of([PrivacyCost(0.1, 0.2, 4)], 1e-5) == pytest.approx(accountant.get_epsilon(1e-5))


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 8.0, 20.0])
def test_noise_that_follows_from_a_budget_spends_it(epsilon: float) -> None:
    cost = PrivacyCost(noise_for(epsilon, 1e-5, 12))
    assert epsilon_of([cost] * 12, 1e-5) == pytest.approx(epsilon, rel=1e-5)
    assert fits([cost] * 12, epsilon, 1e-5)
    assert not fits([cost] * 13, epsilon, 1e-5)
    assert releases_within(cost, epsilon, 1e-5, 100) == 12
    assert releases_within(cost, epsilon, 1e-5, 5) == 5


def test_who_lacks_the_accountant_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r'pip install "polyfed\[privacy\]"'):
        accounting()
