from __future__ import annotations

import math

import pytest
import torch
from papers.fedafd.features import Separation
from papers.projections import pca, project, tsne
from torch import Tensor

from polyfed.core.errors import DataError


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
    positions = tsne(x)
    assert Separation.of(positions, labels).silhouette > 0.7 > 0.5 > Separation.of(pca(x), labels).silhouette
    assert torch.equal(positions, tsne(x))
    assert torch.equal(labels[torch.cdist(positions, positions).fill_diagonal_(math.inf).argmin(1)], labels)


def test_few_and_equal_points_have_places() -> None:
    equal = torch.ones(6, 3), torch.cat([torch.zeros(5, 3), torch.ones(5, 3)])
    for x in (drawn(1, 3), drawn(2, 3), drawn(4, 3), *equal):
        positions = project(x, "tsne")
        assert positions.shape == (len(x), 2)
        assert positions.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pca(torch.zeros(0, 3)), "cannot project points of shape"),
        (lambda: tsne(torch.full((3, 2), math.nan)), "cannot project points of shape"),
        (lambda: pca(torch.zeros(3)), "cannot project points of shape"),
    ],
)
def test_what_has_no_projection(call, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()
