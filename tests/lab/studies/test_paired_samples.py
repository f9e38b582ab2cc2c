"""Paired samples, against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from polyfed.reporting.statistics import PairedSample


def sample(*values: float) -> PairedSample:
    return PairedSample(dict(enumerate(values)))


def test_interval_and_p_are_those_of_a_paired_t_test() -> None:
    draw = np.random.default_rng(0)
    for count in (2, 3, 5, 10):
        left, right = draw.normal(1, 2, count), draw.normal(0, 1, count)
        own = sample(*(left - right))
        test = stats.ttest_rel(left, right)
        interval = test.confidence_interval(0.95)
        assert own.p == pytest.approx(test.pvalue)
        assert own.interval == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(
    ("values", "p"), [((2.0, 2.0, 2.0), 0.0513), ((0.0, 0.0), 1.0), ((1.0,), math.nan)], ids=["same", "none", "one"]
)
def test_p_at_the_edges(values: tuple[float, ...], p: float) -> None:
    assert sample(*values).p == pytest.approx(p, abs=1e-4, nan_ok=True)


def test_equal_differences_have_the_spread_of_the_steps_that_figures_move_in() -> None:
    step = 100 / 30  # of an accuracy over 30 items, whose differences differ in their last bits
    own = sample(50 + step - 50, 40 + step - 40, step)
    assert own.std < 1e-12 < own.spread == pytest.approx(step / math.sqrt(6))
    assert own.p > 0.05
    assert sample(10.0, 10.0, 11.0).spread == sample(10.0, 10.0, 11.0).std  # more than the step of 1 has
