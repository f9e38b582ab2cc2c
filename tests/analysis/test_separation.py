from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from polyfed.analysis.separation import Separation, nearest_mean_accuracy, silhouette, variance_ratio

STREAM = torch.Generator().manual_seed(0)
X = torch.randn(25, 3, generator=STREAM, dtype=torch.float64)
LABELS = torch.randint(3, (25,), generator=STREAM) * 7
LABELS[0] = 100  # alone in its class
X += LABELS[:, None] / 10


def classes(labels: Tensor) -> dict[int, list[int]]:
    return {label: [i for i, own in enumerate(labels.tolist()) if own == label] for label in labels.tolist()}


def far(a: Tensor, b: Tensor) -> float:
    return math.sqrt(sum((float(p) - float(q)) ** 2 for p, q in zip(a, b, strict=True)))


def naive_silhouette(x: Tensor, labels: Tensor) -> float:
    values = []
    for i, own in enumerate(labels.tolist()):
        means = {label: [far(x[i], x[j]) for j in members if j != i] for label, members in classes(labels).items()}
        inner = means.pop(own)
        a, b = sum(inner) / max(1, len(inner)), min(sum(found) / len(found) for found in means.values())
        values.append((b - a) / max(a, b) if inner else 0.0)
    return sum(values) / len(values)


def naive_ratio(x: Tensor, labels: Tensor) -> float:
    between = within = 0.0
    for members in classes(labels).values():
        mean = sum(x[j] for j in members) / len(members)
        between += len(members) * far(mean, x.mean(0)) ** 2
        within += sum(far(x[j], mean) ** 2 for j in members)
    return between / within


def naive_accuracy(x: Tensor, labels: Tensor) -> float:
    right = []
    for i, own in enumerate(labels.tolist()):
        others = {label: [j for j in members if j != i] for label, members in classes(labels).items()}
        if others[own]:
            gaps = {label: far(x[i], sum(x[j] for j in rest) / len(rest)) for label, rest in others.items() if rest}
            right.append(all(gaps[own] < gap for label, gap in gaps.items() if label != own))
    return 100 * sum(right) / len(right)


def test_they_are_as_defined() -> None:
    assert silhouette(X, LABELS) == pytest.approx(naive_silhouette(X, LABELS))
    assert variance_ratio(X, LABELS) == pytest.approx(naive_ratio(X, LABELS))
    assert 40 < nearest_mean_accuracy(X, LABELS) < 100
    assert nearest_mean_accuracy(X, LABELS) == pytest.approx(naive_accuracy(X, LABELS))


def test_nothing_depends_on_place_scale_order_or_numbers_of_classes() -> None:
    order = torch.randperm(25, generator=torch.Generator().manual_seed(1))
    turn = torch.linalg.qr(X[:3])[0]
    changed = Separation.of(5 * (X @ turn)[order] + 2, 3 * LABELS[order] + 1)
    assert vars(changed) == pytest.approx(vars(Separation.of(X, LABELS)))


def test_classes_without_width_and_classes_that_lie_on_each_other() -> None:
    points, labels = torch.tensor([[0.0], [0.0], [1.0], [1.0]]), torch.tensor([0, 0, 1, 1])
    assert Separation.of(points, labels) == Separation(1.0, math.inf, 100.0)
    mixed = Separation.of(torch.tensor([[0.0], [1.0], [0.0], [1.0]]), labels)
    assert mixed.silhouette == pytest.approx(-0.5)
    assert (mixed.ratio, mixed.nearest_mean) == (0.0, 0.0)


def test_ties_count_as_wrong() -> None:
    # without itself the first point's class is at 2, as far as the other class
    assert nearest_mean_accuracy(torch.tensor([[0.0], [2.0], [-2.0], [-2.0]]), torch.tensor([0, 0, 1, 1])) == 75.0


def test_one_class_or_single_samples_have_no_figures() -> None:
    assert all(math.isnan(value) for value in vars(Separation.of(X, torch.zeros(25))).values())
    assert math.isnan(nearest_mean_accuracy(X[:3], torch.arange(3)))
    assert silhouette(X[:3], torch.arange(3)) == 0.0
