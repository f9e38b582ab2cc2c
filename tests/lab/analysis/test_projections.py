from __future__ import annotations

import math

import pytest
import torch
from papers.fedafd.features import Separation
from torch import Tensor

from polyfed.core.errors import ConfigError, DataError
from polyfed.lab.analysis.projections import lda, pca, project, tsne


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clouds(classes: int = 4, each: int = 30, dims: int = 6) -> tuple[Tensor, Tensor]:
    labels = torch.arange(classes).repeat_interleave(each)
    return 3 * drawn(classes, dims)[labels] + drawn(len(labels), dims, seed=1), labels


def test_principal_components_keep_the_widest_plane() -> None:
    x = drawn(40, 5) * torch.tensor([1.0, 9.0, 1.0, 4.0, 1.0]) + 3
    values = torch.linalg.eigvalsh((x - x.mean(0)).T @ (x - x.mean(0)))
    torch.testing.assert_close(pca(x).square().sum(0), values.flip(0)[:2])
    flat = drawn(20, 2)
    torch.testing.assert_close(torch.cdist(pca(flat), pca(flat)), torch.cdist(flat, flat))
    assert pca(drawn(5, 1))[:, 1].tolist() == [0.0] * 5
    assert pca(drawn(1, 4)).tolist() == [[0.0, 0.0]]


def test_tsne_keeps_neighbours_and_is_the_same_each_time() -> None:
    labels = torch.arange(8).repeat_interleave(15)
    x = 2 * drawn(8, 20, seed=1)[labels] + drawn(120, 20)
    places = tsne(x)
    assert Separation.of(places, labels).silhouette > 0.7 > 0.5 > Separation.of(pca(x), labels).silhouette
    assert torch.equal(places, tsne(x))
    close = torch.cdist(places, places).fill_diagonal_(math.inf).argmin(1)
    assert torch.equal(labels[close], labels)


def test_few_and_equal_points_have_places() -> None:
    for x in (
        drawn(1, 3),
        drawn(2, 3),
        drawn(4, 3),
        torch.ones(6, 3),
        torch.cat([torch.zeros(5, 3), torch.ones(5, 3)]),
    ):
        places = project(x, "tsne")
        assert places.shape == (len(x), 2)
        assert places.isfinite().all()


def test_discriminant_axes_separate_more_than_any_other() -> None:
    x, labels = clouds()
    places = lda(x, labels)
    assert places.shape == (120, 2)
    best = Separation.of(places[:, :1], labels).ratio
    assert best > Separation.of(places[:, 1:], labels).ratio
    for seed in range(20):
        assert Separation.of(x @ drawn(6, 1, seed=seed), labels).ratio < 1.02 * best  # but for the shrinkage
    turn, order = torch.linalg.qr(drawn(6, 6))[0], torch.randperm(120, generator=torch.Generator().manual_seed(2))
    changed = lda(100 * (x @ turn + 7)[order], 10 - labels[order])
    torch.testing.assert_close(changed.abs(), places[order].abs(), rtol=1e-5, atol=1e-6)


def test_two_classes_have_one_axis_and_the_widest_beside_it() -> None:
    # around each centre (+-1, 0, 0), (0, +-2, 0) and (0, 0, +-1); the centres differ by (0, 0, 4)
    cross = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 2, 0], [0, -2, 0], [0, 0, 1], [0, 0, -1]])
    x, labels = torch.cat([cross, cross + torch.tensor([0.0, 0, 4])]), torch.tensor([0] * 6 + [1] * 6)
    places = lda(x, labels)
    means = torch.stack([places[:6].mean(0), places[6:].mean(0)])
    assert float((means[1] - means[0]).abs()[0]) > 1
    assert float((means[1] - means[0])[1]) == pytest.approx(0, abs=1e-9)
    torch.testing.assert_close(places[:, 1].abs(), x[:, 1].abs().double())


def test_fewer_points_than_dimensions_and_points_without_width() -> None:
    x, labels = clouds(classes=3, each=3, dims=50)
    assert Separation.of(lda(x.float(), labels), labels).nearest_mean == 100
    points = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [3.0, 4.0]])
    places = lda(points, torch.tensor([0, 0, 1, 1]))
    torch.testing.assert_close((places[0] - places[2]).abs(), torch.tensor([5.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: project(drawn(5, 2), "umap"), "method 'umap'; valid: pca, tsne"),
        (lambda: pca(torch.zeros(0, 3)), "no projection of points of shape"),
        (lambda: tsne(torch.full((3, 2), math.nan)), "no projection of points of shape"),
        (lambda: pca(torch.zeros(3)), "no projection of points of shape"),
        (lambda: lda(torch.ones(3, 4), torch.zeros(3)), "no discriminant axes of 3 points in 1 classes"),
        (lambda: lda(torch.ones(0, 4), torch.zeros(0)), "no discriminant axes of 0 points in 0 classes"),
        (lambda: lda(torch.full((3, 4), math.nan), torch.arange(3)), "finite values"),
        (lambda: lda(torch.ones(3, 1), torch.arange(3)), "3 classes and 1 dimensions"),
    ],
)
def test_what_has_no_projection(call, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        call()
