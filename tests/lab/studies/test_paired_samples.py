"""Paired samples and paired spreads, against scipy and naive loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from polyfed.reporting.statistics import PairedSample, PairedSpreads


def sample(*values: float) -> PairedSample:
    return PairedSample(dict(enumerate(values)))


def spreads(left: list[float], right: list[float]) -> PairedSpreads:
    return PairedSpreads(dict(enumerate(left)), dict(enumerate(right)))


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


def test_spreads_are_compared_by_the_correlation_of_sums_and_differences() -> None:
    draw = np.random.default_rng(0)
    for count in (4, 8):
        left, right = draw.normal(0, 2, count), draw.normal(0, 1, count)
        own = spreads(list(left), list(right))
        assert own.ratio == pytest.approx(np.std(left, ddof=1) / np.std(right, ddof=1), rel=0.05)
        expected = stats.pearsonr(left + right, left - right).pvalue
        assert own.p == pytest.approx(expected, rel=0.1)  # steps add to both variances
        low, high = own.interval
        assert low < own.ratio < high


def test_an_interval_of_a_ratio_ends_where_its_test_no_longer_rejects() -> None:
    draw = np.random.default_rng(3)
    left, right = draw.normal(0, 3, 400), draw.normal(0, 1, 400)  # so many that steps are nothing
    low, high = spreads(list(left), list(right)).interval
    for end in (low, high):
        assert spreads(list(left / end), list(right)).p == pytest.approx(0.05, rel=1e-3)


def test_spreads_at_the_edges() -> None:
    assert math.isnan(spreads([1.0, 2.0], [1.0, 3.0]).p)
    same = spreads([2.0, 2.0, 2.0], [2.0, 2.0, 2.0])
    assert same.p == 1
    assert math.isnan(same.ratio)
    assert math.isnan(same.interval[0])
    constant = spreads([2.0] * 5, [2.0, 4.0, 3.0, 1.0, 2.0])
    assert 0 < constant.p < 0.05  # figures that move in steps are not known exactly
