from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from polyfed.lab.analysis.separation import Separation

STREAM = torch.Generator().manual_seed(0)
X = torch.randn(25, 3, generator=STREAM, dtype=torch.float64)
LABELS = torch.randint(3, (25,), generator=STREAM) * 7
LABELS[0] = 100  # alone in its class
X += LABELS[:, None] / 10


def naive(x: Tensor, labels: Tensor) -> Separation:
    """The definitions, sample by sample."""
    classes = {label: [i for i, own in enumerate(labels.tolist()) if own == label] for label in labels.tolist()}
    silhouettes, right, between, within = [], [], 0.0, 0.0
    for i, own in enumerate(labels.tolist()):
        others = {label: [j for j in members if j != i] for label, members in classes.items()}
        far = {label: [math.dist(x[i], x[j]) for j in members] for label, members in others.items()}
        inner = far.pop(own)
        a, b = sum(inner) / max(1, len(inner)), min(sum(each) / len(each) for each in far.values())
        silhouettes.append((b - a) / max(a, b) if inner else 0.0)
        if others[own]:
            gaps = {label: math.dist(x[i], x[members].mean(0)) for label, members in others.items() if members}
            right.append(all(gaps[own] < gap for label, gap in gaps.items() if label != own))
        mean = x[classes[own]].mean(0)
        between += math.dist(mean, x.mean(0)) ** 2
        within += math.dist(x[i], mean) ** 2
    return Separation(sum(silhouettes) / len(x), between / within, 100 * sum(right) / len(right))


def test_measures_are_as_defined() -> None:
    assert vars(Separation.of(X, LABELS)) == pytest.approx(vars(naive(X, LABELS)))
    assert 40 < Separation.of(X, LABELS).nearest_mean < 100


def test_nothing_depends_on_place_scale_order_or_numbers_of_classes() -> None:
    order = torch.randperm(25, generator=torch.Generator().manual_seed(1))
    turn = torch.linalg.qr(X[:3])[0]
    changed = Separation.of(5 * (X @ turn)[order] + 2, 3 * LABELS[order] + 1)
    assert vars(changed) == pytest.approx(vars(Separation.of(X, LABELS)))


@pytest.mark.parametrize(
    ("points", "labels", "expected"),
    [
        ([0, 0, 1, 1], [0, 0, 1, 1], Separation(1.0, math.inf, 100.0)),  # classes without width
        ([0, 1, 0, 1], [0, 0, 1, 1], Separation(-0.5, 0.0, 0.0)),  # that lie on each other
        ([0, 1, 2], [0, 1, 2], Separation(0.0, math.inf, math.nan)),  # single samples
        ([0, 1, 2], [0, 0, 0], Separation(math.nan, math.nan, math.nan)),
    ],
)
def test_edges(points: list[float], labels: list[int], expected: Separation) -> None:
    measured = Separation.of(torch.tensor(points)[:, None].float(), torch.tensor(labels))
    assert vars(measured) == pytest.approx(vars(expected), nan_ok=True)


def test_ties_count_as_wrong() -> None:
    # without itself the first point's class is at 2, as far as the other class
    points = torch.tensor([[0.0], [2.0], [-2.0], [-2.0]])
    assert Separation.of(points, torch.tensor([0, 0, 1, 1])).nearest_mean == 75.0
