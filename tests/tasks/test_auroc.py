from __future__ import annotations

import math

import pytest
import torch

from polyfed.tasks.auroc import auroc, class_aurocs, macro_auroc


def by_pairs(scores: list[float], positive: list[bool]) -> float:
    """The definition: the share of (positive, negative) pairs in the right order, ties as a half."""
    ups = [s for s, p in zip(scores, positive, strict=True) if p]
    downs = [s for s, p in zip(scores, positive, strict=True) if not p]
    won = sum(1.0 if up > down else 0.5 if up == down else 0.0 for up in ups for down in downs)
    return 100 * won / (len(ups) * len(downs))


@pytest.mark.parametrize("levels", [2, 5, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_it_counts_pairs_and_ties_as_a_half(levels: int, seed: int) -> None:
    stream = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (60,), generator=stream).float() / levels
    positive = torch.rand(60, generator=stream) < 0.3
    assert auroc(scores, positive) == pytest.approx(by_pairs(scores.tolist(), positive.tolist()), abs=1e-9)


def test_known_values() -> None:
    positive = torch.tensor([False, False, True, True])
    assert auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), positive) == pytest.approx(75.0)
    assert auroc(torch.tensor([1.0, 2.0, 3.0, 4.0]), positive) == 100.0
    assert auroc(torch.tensor([4.0, 3.0, 2.0, 1.0]), positive) == 0.0
    assert auroc(torch.ones(4), positive) == 50.0


def test_any_rising_function_of_the_scores_gives_the_same() -> None:
    scores = torch.randn(50, generator=torch.Generator().manual_seed(1))
    positive = torch.arange(50) % 3 == 0
    assert auroc(scores, positive) == pytest.approx(auroc(scores.double().exp(), positive))
    assert auroc(scores, positive) == pytest.approx(100 - auroc(-scores, positive))


def test_without_positives_negatives_or_numbers_there_is_none() -> None:
    scores = torch.arange(3.0)
    assert math.isnan(auroc(scores, torch.zeros(3, dtype=torch.bool)))
    assert math.isnan(auroc(scores, torch.ones(3, dtype=torch.bool)))
    assert math.isnan(auroc(torch.tensor([1.0, math.nan, 2.0]), torch.tensor([True, False, False])))
    assert math.isnan(auroc(torch.zeros(0), torch.zeros(0, dtype=torch.bool)))


def test_many_samples_do_not_overflow_or_round() -> None:
    n = 200_000
    positive = torch.arange(n) % 2 == 0
    assert auroc(torch.arange(n).double() + 2 * positive, positive) == pytest.approx(
        100 * (n / 2 * (n / 2 + 1) / 2 + 0.5 * (n / 2 - 1)) / (n / 2) ** 2, abs=1e-2
    )


def test_of_several_classes_the_mean_against_the_rest_without_absent_ones() -> None:
    stream = torch.Generator().manual_seed(2)
    scores, labels = torch.rand(40, 4, generator=stream), torch.randint(3, (40,), generator=stream)
    each = class_aurocs(scores, labels)
    expected = [by_pairs(scores[:, k].tolist(), (labels == k).tolist()) for k in range(3)]
    assert each[:3] == pytest.approx(expected)
    assert math.isnan(each[3])
    assert macro_auroc(scores, labels) == pytest.approx(sum(expected) / 3)


def test_of_two_classes_that_of_the_second() -> None:
    scores = torch.tensor([[0.0, 1.0], [5.0, 5.5], [0.0, 2.0], [9.0, 1.0]])
    labels = torch.tensor([0, 1, 1, 0])
    differences = (scores[:, 1] - scores[:, 0]).tolist()
    assert macro_auroc(scores, labels) == pytest.approx(by_pairs(differences, [False, True, True, False]))
    assert math.isnan(macro_auroc(scores, torch.zeros(4, dtype=torch.long)))
