from __future__ import annotations

import math

import pytest
import torch

from polyfed.tasks.accuracy import balanced_accuracy, label_ranks, macro_f1, predictions, top


def naive_scores(predicted: list[int], labels: list[int], classes: int) -> tuple[float, float]:
    recalls, f1s = [], []
    for c in range(classes):
        hits = sum(p == c and t == c for p, t in zip(predicted, labels, strict=True))
        if c in labels:
            recalls.append(hits / labels.count(c))
        if c in labels or c in predicted:
            f1s.append(2 * hits / (labels.count(c) + predicted.count(c)))
    return 100 * sum(recalls) / len(recalls), 100 * sum(f1s) / len(f1s)


@pytest.mark.parametrize("seed", range(5))
def test_balanced_accuracy_and_f1_equal_loops(seed):
    generator = torch.Generator().manual_seed(seed)
    predicted, labels = (torch.randint(0, 6, (17,), generator=generator) for _ in range(2))
    recall, f1 = naive_scores(predicted.tolist(), labels.tolist(), 8)
    assert float(balanced_accuracy(predicted, labels, 8)) == pytest.approx(recall)
    assert float(macro_f1(predicted, labels, 8)) == pytest.approx(f1)


def test_ranks_count_ties_and_nan_against_the_model():
    nan = math.nan
    logits = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 0.0], [2.0, nan, 1.0], [nan, 1.0, 2.0], [nan, nan, nan]])
    labels = torch.tensor([0, 0, 0, 0, 0])
    found = label_ranks(logits, labels)
    assert found.tolist() == [0, 1, 1, 2, 2]
    predicted = predictions(logits, labels, found)
    assert (predicted == labels).tolist() == (found == 0).tolist()
    assert predicted[1] == 1


def test_top_k():
    assert float(top(torch.tensor([0, 4, 5, 9]), 5)) == 50.0


def test_one_class():
    logits, labels = torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64)
    found = label_ranks(logits, labels)
    assert predictions(logits, labels, found).tolist() == [0, 0, 0]
    assert float(top(found, 1)) == 100.0
