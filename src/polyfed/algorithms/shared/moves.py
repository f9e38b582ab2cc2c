"""Lengths of clients' moves of a model in a round, their agreement, and the server's step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from polyfed.aggregation.averaging import name_and_shape
from polyfed.federation.filters import Ask, Reply
from polyfed.federation.server import Server
from polyfed.wire.payload import grouped


class Moves:
    """Moves d_k = w_k - w of clients as they come; none is held, and one sum a tensor where directions are compared.

    >>> moves, start = Moves(), {"w": torch.zeros(2)}
    >>> moves.add({"w": torch.tensor([1.0, 0.0])}, start, compared=True)
    >>> moves.add({"w": torch.tensor([0.0, 1.0])}, start, compared=True)
    >>> [round(x, 3) for x in (moves.disagreement() | moves.followed({"w": torch.tensor([0.5, 0.5])}, start)).values()]
    [1.414, 0.707]
    """

    def __init__(self) -> None:
        self._squares: list[dict[str, Tensor]] = []  # of each client: name and shape -> ||d||^2, on the device
        self._totals: dict[str, Tensor] = {}  # name and shape -> sum d

    def add(self, weights: Mapping[str, Tensor], start: Mapping[str, Tensor], *, compared: bool = False) -> None:
        """Add a client's move of its floating tensors; ``compared`` with others' of tensors of one name and shape."""
        keys = {name: name_and_shape(name, value) for name, value in weights.items()}
        squares = dict[str, Tensor]()
        for moves in _moves(weights, start):
            squares |= _squares(moves)
            named = {keys[name]: move for name, move in moves.items()} if compared else {}
            known = [key for key in named if key in self._totals]
            if known:
                torch._foreach_add_([self._totals[key] for key in known], [named[key] for key in known])
            self._totals = named | self._totals
        self._squares.append({keys[name]: squares[name] for name in weights if name in squares})

    def followed(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, float]:
        """``followed``: length of the global model's step in that of a client's move (root mean square).

        1 where all agree and are averaged, 1 / sqrt(n) where n move in unrelated directions, less where an average is
        scaled down. Nothing where no client moved.
        """
        squares = {name: square for moves in _moves(new, old) for name, square in _squares(moves).items()}
        clients, step = self._fetched({name: squares[name] for name in new if name in squares})
        return _ratio("followed", sum(step.values()), _lengths(clients, 1))

    def disagreement(self) -> dict[str, float]:
        """``disagreement``: distance between two clients' moves in the length of one (root mean squares).

        0 where all agree, 1.41 where directions are unrelated, 2 where two oppose; nothing of fewer than two. The mean
        square of distances is 2 (n sum ||d||^2 - ||sum d||^2) / (n (n - 1)).
        """
        clients, totals = self._fetched(_squares(self._totals) if self._totals else {})
        shared = [(n, squares, totals[key]) for key, (n, squares) in clients.items() if n > 1]
        apart = sum(2 * max(n * squares - total, 0.0) / (n * (n - 1)) for n, squares, total in shared)
        return _ratio("disagreement", apart, _lengths(clients, 2))

    def _fetched(self, more: Mapping[str, Tensor]) -> tuple[dict[str, tuple[int, float]], dict[str, float]]:
        """Name and shape -> n and sum ||d||^2 of its clients; and further figures; in one transfer."""
        figures = [figure for squares in (*self._squares, more) for figure in squares.values()]
        values = iter(torch.stack([figure.to(figures[0].device) for figure in figures]).tolist() if figures else ())
        clients: dict[str, tuple[int, float]] = {}
        for key in chain.from_iterable(self._squares):
            count, squares = clients.get(key, (0, 0.0))
            clients[key] = count + 1, squares + next(values)
        return clients, dict(zip(more, values, strict=True))


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


def _lengths(clients: Mapping[str, tuple[int, float]], least: int) -> float:
    return sum(squares / n for n, squares in clients.values() if n >= least)


@torch.no_grad()
def _moves(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    # in groups: a model's moves are as large as the model
    floating = {name: value for name, value in new.items() if value.is_floating_point()}
    for names in grouped(floating):
        values = [floating[name].float() for name in names]
        moves = torch._foreach_sub(values, [old[name].to(values[0]) for name in names])
        yield dict(zip(names, moves, strict=True))


def _squares(moves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    values = [*moves.values()]
    return {name: square.sum() for name, square in zip(moves, torch._foreach_mul(values, values), strict=True)}
