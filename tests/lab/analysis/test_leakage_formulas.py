"""Figures and attacks against loops written from the formulas, and cases worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from polyfed.lab.analysis.leakage import (
    Discrimination,
    Interval,
    area,
    confidence,
    first_of_each,
    leak_verdict,
    pair_margin,
    threshold,
)

_SCORES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12).map(np.array)


@given(_SCORES, _SCORES)
def test_the_area_counts_pairs_that_are_in_order(members: np.ndarray, others: np.ndarray) -> None:
    wins = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a in members for b in others)
    assert area(members, others) == pytest.approx(wins / (len(members) * len(others)))


def test_one_in_a_hundred_others_may_be_above_the_threshold() -> None:
    others = np.arange(200.0)
    assert threshold(others) == 197.0  # two of 200 are above
    assert threshold(np.arange(50.0)) == 49.0  # no other may be
    result = Discrimination.of(np.array([196.5, 197.5, 300.0, 0.0]), others, seed=0)
    assert result.rate.value == 0.5
    assert result.rate.low < 0.0676 < 0.9324 < result.rate.high  # those of Clopper and Pearson, at a known threshold
    assert result.auc.low <= result.auc.value <= result.auc.high
    assert Discrimination.of(np.array([1.0, 2.0]), others, 0) == Discrimination.of(np.array([1.0, 2.0]), others, 0)


def _covered(shift: float, items: int, studies: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Share of simulated attacks whose interval holds the true rate."""
    monkeypatch.setattr("polyfed.lab.analysis.leakage.bootstrapped", lambda *_: (0.0, 1.0))
    draw, true = np.random.default_rng(items), float(norm.sf(norm.isf(0.01) - shift))
    result = [Discrimination.of(draw.normal(shift, 1, items), draw.normal(0, 1, items), k).rate for k in range(studies)]
    return sum(rate.low <= true <= rate.high for rate in result) / studies


@pytest.mark.parametrize(("shift", "items"), [(0.0, 100), (2.0, 100), (1.0, 250)])
def test_intervals_of_the_rate_hold_the_true_rate(shift: float, items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _covered(shift, items, 60, monkeypatch) >= 0.9


def test_each_candidate_is_of_another_item() -> None:
    """Captions of one image are members together: five of them are not five trials."""
    assert first_of_each(torch.tensor([3, 3, 1, 3, 0, 1])).tolist() == [0, 2, 4]
    assert first_of_each(torch.arange(4)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("interval", "is_protected", "verdict"),
    [
        (Interval(0.9, 0.8, 1.0), True, "much"),
        (Interval(0.65, 0.55, 0.7), True, "some"),
        (Interval(0.55, 0.51, 0.6), True, "little"),
        (Interval(0.55, 0.49, 0.6), True, "nothing found"),
        (Interval(0.55, 0.49, 0.6), False, "attack too weak"),
    ],
)
def test_verdicts(interval: Interval, is_protected: bool, verdict: str) -> None:
    assert leak_verdict(interval, is_protected=is_protected) == verdict


def test_scores_of_a_sample() -> None:
    logits, labels = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]]).double(), torch.tensor([0, 2])
    for value, row, label in zip(confidence(logits, labels), logits, labels, strict=True):
        p = row.softmax(0)[label]
        assert float(value) == pytest.approx(float((p / (1 - p)).log()))
    similar = torch.tensor([[0.9, 0.1, 0.2], [0.3, 0.4, 0.5], [0.0, 0.6, 0.8]])
    others = [similar[0, 1], similar[0, 2], similar[1, 0], similar[2, 0]]
    assert float(pair_margin(similar)[0]) == pytest.approx(float(similar[0, 0] - torch.stack(others).mean()))
