"""Lengths and directions of clients' moves, by hand."""

from __future__ import annotations

import pytest
import torch

from polyfed.algorithms.shared.moves import Moves

START = {"w": torch.tensor([1.0, 1.0]), "steps": torch.tensor(3)}


@pytest.mark.parametrize(
    ("ends", "disagreement", "followed"),
    [
        ([[3.0, 4.0]] * 3, 0.0, 0.2),  # the server moves by 1 where each moves by 5
        ([[3.0, 4.0], [4.0, -3.0]], 2**0.5, 0.2),
        ([[3.0, 4.0], [-3.0, -4.0]], 2.0, 0.2),
        # squares of distances 2, 1 and 1, of lengths 1, 1 and 0
        ([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], ((2 + 1 + 1) / 3 / (2 / 3)) ** 0.5, (2 / 3) ** -0.5),
        ([[0.0, 0.0]], None, None),
    ],
)
def test_moves_by_hand(ends: list[list[float]], disagreement: float | None, followed: float | None) -> None:
    moves = Moves()
    for end in ends:
        moves.add({"w": START["w"] + torch.tensor(end), "steps": torch.tensor(9)}, START, compared=True)
    assert moves.disagreement().get("disagreement") == pytest.approx(disagreement, abs=1e-6)
    assert moves.followed({"w": torch.tensor([1.0, 2.0])}, START).get("followed") == pytest.approx(followed)
