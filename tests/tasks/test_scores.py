"""Intervals of metrics over test items."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from polyfed.tasks.scores import TaskScores, mean_by_item, share_interval


def test_samples_of_one_item_are_drawn_together() -> None:
    draw = np.random.default_rng(0)
    hits = draw.random(30) < 0.4
    values, items = torch.tensor(hits).repeat_interleave(5).double() * 100, torch.arange(30).repeat_interleave(5)
    value = float(values.mean())
    together, apart = (
        TaskScores({"r": value}, {"r": [mean_by_item(values, numbers)]}).intervals()["r"]
        for numbers in (items, torch.arange(150))
    )
    own = TaskScores({"r": value}, {"r": [mean_by_item(values[::5], torch.arange(30))]}).intervals()["r"]
    assert together == pytest.approx(own)
    assert together[1] - together[0] > 2 * (apart[1] - apart[0])
    naive = [100 * hits[draw.integers(0, 30, 30)].mean() for _ in range(4000)]
    assert together == pytest.approx(np.quantile(naive, [0.025, 0.975]).tolist(), abs=3.5)


def test_both_directions_of_an_item_are_drawn_together() -> None:
    values = torch.tensor([100.0, 0.0] * 20)
    terms = [mean_by_item(values, torch.arange(40)), mean_by_item(100 - values, torch.arange(40))]
    low, high = TaskScores({"sum": 100.0}, {"sum": terms}).intervals()["sum"]

    assert low > 60  # drawn apart they would range from 56 to 144
    assert high < 140


@pytest.mark.parametrize(("value", "trials"), [(0.0, 10), (100.0, 4), (42.0, 50), (10.0, 200)])
def test_a_share_has_the_exact_interval(value: float, trials: int) -> None:
    exact = binomtest(round(value / 100 * trials), trials).proportion_ci(0.95)
    assert share_interval(value, trials) == pytest.approx((100 * exact.low, 100 * exact.high))


def test_items_that_are_all_alike_have_an_interval_all_the_same() -> None:
    scores = TaskScores({"r": 100.0}, {"r": [mean_by_item(torch.full((4,), 100.0), torch.arange(4))]})
    assert scores.intervals()["r"] == pytest.approx(share_interval(100.0, 4))
    assert TaskScores({"r": 1.0}).intervals() == {}


@pytest.mark.parametrize("items", [20, 100])
def test_coverage_over_items(items: int) -> None:
    draw, covered = np.random.default_rng(items), 0
    for _ in range(100):
        chances = draw.beta(2, 2, items).repeat(5)  # captions of a picture are alike
        values = torch.tensor(draw.random(5 * items) < chances).double() * 100
        own = mean_by_item(values, torch.arange(items).repeat_interleave(5))
        low, high = TaskScores({"r": float(values.mean())}, {"r": [own]}).intervals()["r"]
        covered += low <= 50 <= high
    assert covered >= 88
