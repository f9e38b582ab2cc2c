from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyfed.analysis.lda import class_means, lda
from polyfed.core.errors import DataError


def clouds(classes: int = 4, each: int = 30, dims: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(classes, dims, generator=stream, dtype=torch.float64)
    labels = torch.arange(classes).repeat_interleave(each)
    widths = 0.5 + torch.rand(dims, generator=stream, dtype=torch.float64)
    return centres[labels] + widths * torch.randn(len(labels), dims, generator=stream, dtype=torch.float64), labels


def same_up_to_sign(a: Tensor, b: Tensor) -> None:
    sign = (a * b).sum(0).sign()
    torch.testing.assert_close(a * sign, b, rtol=1e-6, atol=1e-8)


def test_two_classes_by_hand() -> None:
    # each class: (+-1, 0) and (0, +-2) around its centre, S_w = diag(1/2, 2); centres differ by (2, 4)
    cross = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]], dtype=torch.float64)
    x = torch.cat([cross, cross + torch.tensor([2.0, 4.0])])
    found = lda(x, torch.tensor([0] * 4 + [1] * 4), shrinkage=0.0)
    # w is along S_w^-1 (2, 4) = (4, 2); w^T S_w w = 1 gives (2, 1) / 2; S_b = (1, 2)(1, 2)^T gives (1 + 1)^2 = 4
    torch.testing.assert_close(found.axes[:, 0], torch.tensor([1.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(found.ratios, torch.tensor([4.0, 0.0], dtype=torch.float64))
    # the second axis, S_w-orthogonal to the first: 0.5 w_1 + w_2 = 0, with unit variance
    torch.testing.assert_close(found.axes[:, 1].abs(), torch.tensor([2.0, 1.0], dtype=torch.float64) / 2)


def test_axes_have_unit_variance_within_and_are_uncorrelated() -> None:
    x, labels = clouds()
    found = lda(x, labels, shrinkage=0.0)
    projected = found.project(x)
    means, _ = class_means(projected, labels, 4)
    inner = projected - means[labels]
    torch.testing.assert_close(inner.T @ inner / len(x), torch.eye(2, dtype=torch.float64))
    between = (means.square() * 30 / len(x)).sum(0)
    torch.testing.assert_close(between, found.ratios)
    assert float(found.ratios[0]) > float(found.ratios[1])


def test_no_direction_separates_better() -> None:
    x, labels = clouds()
    found = lda(x, labels, shrinkage=0.0)
    for seed in range(50):
        axis = torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        y = x @ axis
        means, _ = class_means(y[:, None], labels, 4)
        within = (y - means[labels, 0]).square().mean()
        assert float((means[labels, 0] - y.mean()).square().mean() / within) <= float(found.ratios[0]) + 1e-9


def test_a_move_a_turn_a_scale_and_other_labels_change_nothing() -> None:
    x, labels = clouds()
    expected = lda(x, labels).project(x)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    same_up_to_sign(lda(x + 7, labels).project(x + 7), expected)
    same_up_to_sign(lda(x @ turn, labels).project(x @ turn), expected)
    same_up_to_sign(lda(x * 100, labels).project(x * 100), expected)
    same_up_to_sign(lda(x, 10 - labels).project(x), expected)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    same_up_to_sign(lda(x[order], labels[order]).project(x), expected)


def test_without_shrinkage_any_linear_map_changes_nothing() -> None:
    x, labels = clouds()
    mix = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = lda(x, labels, shrinkage=0.0).project(x)
    same_up_to_sign(lda(x @ mix, labels, shrinkage=0.0).project(x @ mix), expected)


def test_fewer_points_than_dimensions() -> None:
    x, labels = clouds(classes=3, each=3, dims=50)
    found = lda(x.float(), labels)
    assert bool(found.axes.isfinite().all())
    means, _ = class_means(found.project(x), labels, 3)
    assert float(torch.cdist(means, means)[0, 1:].min()) > 1


def test_points_without_any_width() -> None:
    x = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [3.0, 4.0]])
    found = lda(x, torch.tensor([0, 0, 1, 1])).project(x)
    torch.testing.assert_close((found[0] - found[2]).abs(), torch.tensor([5.0, 0.0], dtype=torch.float64))


def test_an_axis_that_is_its_own_whitened_unit_vector() -> None:
    # the first discriminant axis is the widest one already: the further axis must be another
    x = torch.tensor([[3.0, 1.0], [-3.0, 1.0], [3.0, -1.0], [-3.0, -1.0]], dtype=torch.float64)
    points = torch.cat([x, x + torch.tensor([10.0, 0.0])])
    found = lda(points, torch.tensor([0] * 4 + [1] * 4), shrinkage=0.0)
    torch.testing.assert_close(found.axes, torch.diag(torch.tensor([1 / 3, 1.0], dtype=torch.float64)))


@pytest.mark.parametrize(
    ("x", "labels"),
    [
        (torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)),
        (torch.ones(3, 1), torch.arange(3)),
        (torch.ones(0, 4), torch.zeros(0, dtype=torch.int64)),
        (torch.full((3, 4), float("nan")), torch.arange(3)),
    ],
)
def test_what_has_no_axes(x: Tensor, labels: Tensor) -> None:
    with pytest.raises(DataError, match="no discriminant axes"):
        lda(x, labels)
