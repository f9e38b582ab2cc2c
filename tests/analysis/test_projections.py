from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from polyfed.analysis import projections
from polyfed.analysis.projections import neighbourhoods, pca, project, similarities, tsne
from polyfed.analysis.separation import silhouette
from polyfed.core.errors import ConfigError, DataError


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_principal_components_keep_the_widest_plane() -> None:
    x = drawn(40, 5) * torch.tensor([1.0, 9.0, 1.0, 4.0, 1.0]) + 3
    found = pca(x)
    centred = x - x.mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    torch.testing.assert_close(found.square().sum(0), values.flip(0)[:2])
    expected = centred @ vectors.flip(1)[:, :2]
    torch.testing.assert_close(found.abs(), expected.abs())
    flat = drawn(20, 2)
    torch.testing.assert_close(torch.cdist(pca(flat), pca(flat)), torch.cdist(flat, flat))


def test_axes_that_are_not_there_are_zero() -> None:
    assert pca(drawn(5, 1))[:, 1].tolist() == [0.0] * 5
    assert pca(drawn(1, 4)).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("perplexity", [2.0, 10.0, 25.0])
def test_every_point_has_the_wanted_perplexity(perplexity: float) -> None:
    x = drawn(80, 6) * torch.linspace(0.1, 40, 80)[:, None]
    found = neighbourhoods(x, perplexity)
    assert found.diagonal().tolist() == [0.0] * 80
    torch.testing.assert_close(found.sum(1), torch.ones(80, dtype=torch.float64))
    for row in found:
        entropy = -sum(p * math.log(p) for p in row.tolist() if p > 0)
        assert math.exp(entropy) == pytest.approx(perplexity, rel=1e-6)


def test_weights_of_neighbours_are_gaussian() -> None:
    x = drawn(12, 3)
    found = neighbourhoods(x, 4)
    squares = torch.cdist(x, x).square()
    for i in range(12):
        others = [j for j in range(12) if j != i]
        slopes = [
            float((found[i, j] / found[i, others[0]]).log() / (squares[i, others[0]] - squares[i, j]))
            for j in others[1:]
        ]
        assert slopes == pytest.approx([slopes[0]] * len(slopes), rel=1e-6)
    both = similarities(x, 4)
    torch.testing.assert_close(both, both.T)
    assert float(both.sum()) == pytest.approx(1)


def test_the_gradient_is_that_of_the_divergence() -> None:
    wanted = similarities(drawn(9, 4), 2.5)
    y = drawn(9, 2, seed=1).requires_grad_()
    near = 1 / (1 + (y[:, None] - y).square().sum(-1))
    near = near * (1 - torch.eye(9))
    divergence = (wanted * (wanted.clamp(min=1e-300) / (near / near.sum()).clamp(min=1e-300)).log()).sum()
    (expected,) = torch.autograd.grad(divergence, y)
    torch.testing.assert_close(projections._gradient(wanted, y.detach()), expected)


def test_clusters_stay_apart_and_neighbours_together() -> None:
    labels = torch.arange(8).repeat_interleave(15)
    x = 2 * drawn(8, 20, seed=1)[labels] + drawn(120, 20)
    found = tsne(x, "test")
    assert silhouette(found, labels) > 0.7 > 0.5 > silhouette(pca(x), labels)
    assert torch.equal(found, tsne(x, "test"))
    close = torch.cdist(found, found).fill_diagonal_(math.inf).argmin(1)
    assert torch.equal(labels[close], labels)


def test_a_line_stays_a_line() -> None:
    places = torch.arange(40.0)[:, None] * torch.tensor([[1.0, 2.0, -1.0]])
    found = tsne(places, perplexity=5)
    close = torch.cdist(found, found).fill_diagonal_(math.inf).argmin(1)
    assert (close - torch.arange(40)).abs().max() <= 2


def test_few_and_equal_points_have_places() -> None:
    assert tsne(drawn(1, 3)).shape == (1, 2)
    assert tsne(drawn(2, 3)).shape == (2, 2)
    for x in (drawn(4, 3), torch.ones(6, 3), torch.cat([torch.zeros(5, 3), torch.ones(5, 3)])):
        assert tsne(x).isfinite().all()


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="method 'umap'; valid: pca, tsne"):
        project(drawn(5, 2), "umap")
    with pytest.raises(DataError, match="t-SNE of 2,001 points is too slow; it takes 2,000"):
        tsne(torch.zeros(2001, 2))
    for x in (torch.zeros(0, 3), torch.full((3, 2), math.nan), torch.zeros(3)):
        with pytest.raises(DataError, match="no projection of points of shape"):
            pca(x)
