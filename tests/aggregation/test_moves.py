"""Lengths and directions of clients' moves, by hand."""

from __future__ import annotations

import pytest
import torch

from polyfed.aggregation.moves import Moves

START = {"w": torch.tensor([1.0, 1.0]), "steps": torch.tensor(3)}


def moved(*ends: tuple[float, float], compared: bool = True) -> Moves:
    moves = Moves()
    for end in ends:
        moves.add({"w": START["w"] + torch.tensor(end), "steps": torch.tensor(9)}, START, compared=compared)
    return moves


@pytest.mark.parametrize(
    ("ends", "disagreement"),
    [
        ([(3.0, 4.0)] * 3, 0.0),
        ([(3.0, 4.0), (4.0, -3.0)], 2**0.5),
        ([(3.0, 4.0), (-3.0, -4.0)], 2.0),
        # squares of distances 2, 1 and 1, of lengths 1, 1 and 0
        ([(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)], ((2 + 1 + 1) / 3 / (2 / 3)) ** 0.5),
    ],
)
def test_clients_disagree(ends: list[tuple[float, float]], disagreement: float) -> None:
    assert moved(*ends).disagreement()["disagreement"] == pytest.approx(disagreement, abs=1e-6)


def test_the_server_follows_by_the_length_of_a_client() -> None:
    moves = moved((3.0, 4.0), (0.0, 1.0), compared=False)  # squares 25 and 1, mean 13
    assert moves.followed({"w": START["w"] + 0.5}, START)["followed"] == pytest.approx((0.5 / 13) ** 0.5)


def test_nothing_is_told_of_nobody() -> None:
    assert moved().followed(START, START) == moved((0.0, 0.0)).followed(START, START) == {}
    assert moved((1.0, 0.0)).disagreement() == {}
