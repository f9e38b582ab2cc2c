from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.lab.analysis.kernel_alignment import linear_cka


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_hsic(x: Tensor, y: Tensor) -> float:
    """The unbiased estimate as it is defined (Song et al. 2012, Eq. 5), entry by entry."""
    n = len(x)
    K = [[0.0 if i == j else float(x[i] @ x[j]) for j in range(n)] for i in range(n)]
    L = [[0.0 if i == j else float(y[i] @ y[j]) for j in range(n)] for i in range(n)]
    trace = sum(K[i][j] * L[j][i] for i in range(n) for j in range(n))
    sums = sum(map(sum, K)) * sum(map(sum, L))
    chain = sum(K[i][j] * L[j][k] for i in range(n) for j in range(n) for k in range(n))
    return (trace + sums / ((n - 1) * (n - 2)) - 2 * chain / (n - 2)) / (n * (n - 3))


@pytest.mark.parametrize("n", [4, 9])
def test_it_is_as_defined(n: int) -> None:
    x, y = drawn(n, 3) + 2, drawn(n, 5, seed=1)
    y[:, 0] += x[:, 0]
    expected = naive_hsic(x, y) / (naive_hsic(x, x) * naive_hsic(y, y)) ** 0.5
    found = linear_cka([x, y])
    torch.testing.assert_close(found, torch.tensor([[1, expected], [expected, 1]], dtype=torch.float64))


def test_more_samples_than_a_block_of_rows() -> None:
    x, y = drawn(150, 4), drawn(150, 4, seed=1)
    y += x
    centred = torch.eye(150, dtype=torch.float64) - 1 / 150
    biased = (centred @ x).T @ (centred @ y)
    kernels = [(centred @ each).T @ (centred @ each) for each in (x, y)]
    share = biased.square().sum() / (kernels[0].norm() * kernels[1].norm())
    assert float(linear_cka([x, y])[0, 1]) == pytest.approx(float(share), abs=0.03)


def test_a_turn_a_shift_and_a_scale_change_nothing() -> None:
    x = drawn(30, 6)
    turn = torch.linalg.qr(drawn(6, 6, seed=2))[0]
    other = drawn(30, 4, seed=3) + x[:, :4]
    found = linear_cka([x, 7 * x @ turn + 100, other])
    assert float(found[0, 1]) == pytest.approx(1)
    assert float(found[0, 2]) == pytest.approx(float(found[1, 2]))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(linear_cka([x[order], 7 * x[order] @ turn + 100, other[order]]), found)
    torch.testing.assert_close(linear_cka([x.float(), other.float()])[0, 1], found[0, 2], atol=1e-6, rtol=0)


def test_vectors_that_are_all_equal_have_none() -> None:
    found = linear_cka([drawn(10, 3), torch.full((10, 3), 0.1), drawn(10, 2, seed=1)])
    assert found[1].isnan().all()
    assert found[:, 1].isnan().all()
    assert found[[0, 0, 2], [0, 2, 2]].isfinite().all()


@pytest.mark.parametrize(
    "sets", [[], [drawn(3, 2)], [drawn(5, 2), drawn(6, 2)], [torch.tensor([[1.0], [2.0], [3.0], [torch.nan]])]]
)
def test_what_cannot_be(sets: list[Tensor]) -> None:
    with pytest.raises(DataError, match="it needs one finite vector for each of at least 4 samples"):
        linear_cka(sets)
