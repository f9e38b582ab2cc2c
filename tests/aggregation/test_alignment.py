"""Maps between spaces of representations: against numpy and scipy, by hand, and what no map may do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.ensemble import Alignment, procrustes, ridge


def unit(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=-1)


def rotation(width: int, seed: int = 9) -> Tensor:
    return torch.linalg.qr(unit(width, width, seed=seed))[0]


@pytest.fixture
def both() -> tuple[Tensor, Tensor]:
    return unit(40, 6, seed=1), unit(40, 6, seed=2)


def test_procrustes_is_that_of_scipy(both: tuple[Tensor, Tensor]) -> None:
    values, reference = both
    expected = values.numpy() @ orthogonal_procrustes(values.numpy(), reference.numpy())[0]
    np.testing.assert_allclose(procrustes(values, reference).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("mirror", [False, True])
def test_a_rotated_or_reflected_copy_comes_back(mirror: bool) -> None:
    reference, turn = unit(40, 6, seed=1), rotation(6)
    if mirror != bool(torch.linalg.det(turn) < 0):
        turn = turn * torch.tensor([-1.0, 1, 1, 1, 1, 1])
    torch.testing.assert_close(procrustes(reference @ turn, reference), reference)
    torch.testing.assert_close(ridge(reference @ turn, reference, 1e-6), reference, atol=1e-3, rtol=0)


def test_by_hand_a_quarter_turn() -> None:
    values, reference = torch.eye(2), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    torch.testing.assert_close(procrustes(values, reference), reference)


@pytest.mark.parametrize("penalty", [1e-6, 0.01, 3.0])
def test_ridge_solves_the_normal_equations(both: tuple[Tensor, Tensor], penalty: float) -> None:
    values, reference = (side.numpy() for side in both)
    # least squares with the penalty as further rows
    rows = np.vstack([values, np.sqrt(penalty * len(values)) * np.eye(6)])
    weights = np.linalg.lstsq(rows, np.vstack([reference, np.zeros((6, 6))]), rcond=None)[0]
    expected = values @ weights
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(ridge(*both, penalty).numpy(), expected, atol=1e-10)


def test_ridge_by_hand() -> None:
    """One dimension counts: w = (1 + 1) / (2 + 2 x 0.5) = 2 / 3, which unit length takes away again."""
    values, reference = torch.tensor([[1.0, 0], [1.0, 0]]), torch.tensor([[0.0, 1], [0.0, 1]])
    torch.testing.assert_close(ridge(values, reference, 0.5), reference)


def test_without_a_penalty_as_many_dimensions_as_samples_say_nothing() -> None:
    values, reference = unit(6, 6, seed=1), unit(6, 6, seed=2)
    torch.testing.assert_close(ridge(values, reference, 1e-9), reference, atol=1e-4, rtol=0)
    assert (ridge(values, reference, 0.1) - reference).norm() > 0.5


@pytest.mark.parametrize("kind", ["procrustes", "ridge"])
def test_rows_that_are_zero_on_either_side_do_not_count(both: tuple[Tensor, Tensor], kind: str) -> None:
    values, reference = (side.clone() for side in both)
    values[3], reference[5] = 0, 0
    move = Alignment(kind=kind).move  # type: ignore[arg-type]
    found = move(values, reference)
    others = [k for k in range(40) if k not in (3, 5)]
    torch.testing.assert_close(found[others], move(values[others], reference[others]))
    assert not found[3].any()
    assert found[5].norm() == pytest.approx(1)  # it is mapped, as the others say


@pytest.mark.parametrize("kind", ["procrustes", "ridge"])
def test_edges(kind: str) -> None:
    nothing, few = torch.zeros(4, 3), unit(2, 5, seed=1, dtype=torch.float32)
    move = Alignment(kind=kind).move  # type: ignore[arg-type]
    assert not move(nothing, unit(4, 3, seed=1, dtype=torch.float32)).any()
    assert torch.isfinite(move(few, unit(2, 5, seed=2))).all()
    half = move(few.bfloat16(), few)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, few, atol=0.02, rtol=0)
