"""Lengths of clients' moves of a model in a round, their agreement, and the server's step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from polyfed.aggregation.averaging import name_and_shape
from polyfed.federation.filters import Ask, Reply
from polyfed.federation.server import Server


class Moves:
    """Moves d_k = w_k - w of clients as they come; none is held, and one sum a tensor where directions are compared.

    >>> moves, start = Moves(), {"w": torch.zeros(2)}
    >>> moves.add({"w": torch.tensor([1.0, 0.0])}, start, compared=True)
    >>> moves.add({"w": torch.tensor([0.0, 1.0])}, start, compared=True)
    >>> [round(x, 3) for x in (moves.disagreement() | moves.followed({"w": torch.tensor([0.5, 0.5])}, start)).values()]
    [1.414, 0.707]
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, float, Tensor | float]] = {}  # name and shape -> n, sum ||d||^2, sum d

    def add(self, weights: Mapping[str, Tensor], start: Mapping[str, Tensor], *, compared: bool = False) -> None:
        """Add a client's move of its floating tensors; ``compared`` with others' of tensors of one name and shape."""
        for name, move in _moves(weights, start):
            count, squares, total = self._sums.get(key := name_and_shape(name, move), (0, 0.0, 0.0))
            self._sums[key] = count + 1, squares + _square(move), total + move if compared else 0.0

    def followed(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, float]:
        """``followed``: length of the global model's step in that of a client's move (root mean square).

        1 where all agree and are averaged, 1 / sqrt(n) where n move in unrelated directions, less where an average is
        scaled down. Nothing where no client moved.
        """
        return _ratio("followed", sum(_square(move) for _, move in _moves(new, old)), self._lengths(1))

    def disagreement(self) -> dict[str, float]:
        """``disagreement``: distance between two clients' moves in the length of one (root mean squares).

        0 where all agree, 1.41 where directions are unrelated, 2 where two oppose; nothing of fewer than two. The mean
        square of distances is 2 (n sum ||d||^2 - ||sum d||^2) / (n (n - 1)).
        """
        shared = [(n, squares, _square(torch.as_tensor(total))) for n, squares, total in self._sums.values() if n > 1]
        apart = sum(2 * max(n * squares - total, 0.0) / (n * (n - 1)) for n, squares, total in shared)
        return _ratio("disagreement", apart, self._lengths(2))

    def _lengths(self, least: int) -> float:
        return sum(squares / n for n, squares, _ in self._sums.values() if n >= least)


class MovesObserver:
    """Filter that records how far the server's own model follows its clients, or how far clients disagree.

    It passes replies on unchanged; figures are recorded when the server updates its global models.

    Attributes:
        server: server whose own model is observed; without one nothing is recorded.
        compared: records the ``disagreement`` of the clients of all types, in place of ``followed``.
    """

    def __init__(self, server: Server, *, compared: bool) -> None:
        self.server, self.compared = server, compared

    def __call__(self, replies: Iterator[Reply], ask: Ask) -> Iterator[Reply]:
        if ask.schema.kind != "step" or "weights" not in ask.schema.returns or not self.server.has_model:
            return replies
        moves, own, old = Moves(), self.server.own_type, dict(self.server.weights)

        def noted(reply: Reply) -> Reply:
            name = self.server.type_of(reply.sender)
            if self.compared or name == own:
                moves.add(reply.weights, old[name], compared=self.compared)
            return reply

        def record(new: Mapping[str, Mapping[str, Tensor]]) -> None:
            followed = {} if self.compared or own not in new else moves.followed(new[own], old[own])
            self.server.record(**moves.disagreement() if self.compared else followed)

        self.server.diagnostics.updating = record
        return map(noted, replies)


def _ratio(name: str, square: float, of: float) -> dict[str, float]:
    return {name: math.sqrt(square / of)} if of else {}


def _moves(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    # one tensor at a time: a model's moves are as large as the model
    floating = ((name, value.detach()) for name, value in new.items() if value.is_floating_point())
    return ((name, value.float() - old[name].detach().to(value.device, torch.float32)) for name, value in floating)


def _square(move: Tensor) -> float:
    return float(move.square().sum())
