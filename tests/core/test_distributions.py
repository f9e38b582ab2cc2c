from __future__ import annotations

import pytest
import torch
from scipy.special import betaincinv, ndtri, stdtr, stdtrit

from polyfed.core.distributions import beta_quantile, student_beyond, student_reach
from polyfed.privacy.secret import normal_draws, uniform_draws


@pytest.mark.parametrize("a", [0.5, 1.0, 3.25, 60.0, 20_000.0])
@pytest.mark.parametrize("b", [0.5, 1.0, 7.5, 900.0])
def test_quantiles_are_those_of_scipy(a: float, b: float) -> None:
    for share in (0.025, 0.5, 0.975):
        assert beta_quantile(share, a, b) == pytest.approx(betaincinv(a, b, share), rel=1e-11, abs=1e-14)


@pytest.mark.parametrize("degrees", [1, 2, 4, 9, 60])
def test_student_is_that_of_scipy(degrees: int) -> None:
    assert student_reach(degrees) == pytest.approx(stdtrit(degrees, 0.975), rel=1e-12)
    for reach in (0.0, 1e-3, 0.9, 1.1, 4.0, 1e3):
        assert student_beyond(reach, degrees) == pytest.approx(2 * stdtr(degrees, -reach), rel=1e-11)
    assert student_beyond(1e200, degrees) == 0


def test_normal_draws_are_those_of_scipy() -> None:
    expected = torch.from_numpy(ndtri(uniform_draws(b"key", 10_000).numpy()))
    torch.testing.assert_close(normal_draws(b"key", 10_000), expected, rtol=1e-14, atol=1e-15)
