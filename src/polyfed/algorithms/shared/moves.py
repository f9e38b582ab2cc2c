"""Lengths of clients' moves of a model in a round, their agreement, and the server's step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
        self._squares: list[dict[str, Tensor]] = []  # name and shape -> ||d||^2 of a client, on the device
        self._totals: dict[str, Tensor] = {}  # name and shape -> sum d

    def add(self, weights: Mapping[str, Tensor], start: Mapping[str, Tensor], *, compared: bool = False) -> None:
        """Add a client's move of its floating tensors; ``compared`` with others' of tensors of one name and shape."""
        for moves, squares in _moves(weights, start):
            self._squares.append(squares)
            if compared:
                self._totals |= {key: torch.zeros_like(move) for key, move in moves.items() if key not in self._totals}
                torch._foreach_add_([self._totals[key] for key in moves], [*moves.values()])

    def followed(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, float]:
        """``followed``: length of the global model's step in that of a client's move (root mean square).

        1 where all agree and are averaged, 1 / sqrt(n) where n move in unrelated directions, less where an average is
        scaled down. Nothing where no client moved.
        """
        clients, step = self._fetched([one for _, squares in _moves(new, old) for one in squares.values()])
        return _ratio("followed", sum(step), clients, 1)

    def disagreement(self) -> dict[str, float]:
        """``disagreement``: distance between two clients' moves in the length of one (root mean squares).

        0 where all agree, 1.41 where directions are unrelated, 2 where two oppose; nothing of fewer than two. The mean
        square of distances is 2 (n sum ||d||^2 - ||sum d||^2) / (n (n - 1)).
        """
        clients, fetched = self._fetched([total.square().sum() for total in self._totals.values()])
        totals = dict(zip(self._totals, fetched, strict=True))
        shared = [(n, squares, totals[key]) for key, (n, squares) in clients.items() if n > 1]
        apart = sum(2 * max(n * squares - total, 0.0) / (n * (n - 1)) for n, squares, total in shared)
        return _ratio("disagreement", apart, clients, 2)

    def _fetched(self, more: Sequence[Tensor]) -> tuple[dict[str, tuple[int, float]], list[float]]:
        """Name and shape -> n and sum ||d||^2 of its clients; and the values of further figures; in one transfer."""
        figures = [*chain.from_iterable(squares.values() for squares in self._squares), *more]
        values = iter(torch.stack([figure.to(figures[0].device) for figure in figures]).tolist() if figures else ())
        clients: dict[str, tuple[int, float]] = {}
        for key in chain.from_iterable(self._squares):
            count, squares = clients.get(key, (0, 0.0))
            clients[key] = count + 1, squares + next(values)
        return clients, list(values)


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


def _ratio(name: str, square: float, clients: Mapping[str, tuple[int, float]], least: int) -> dict[str, float]:
    of = sum(squares / n for n, squares in clients.values() if n >= least)
    return {name: math.sqrt(square / of)} if of else {}


@torch.no_grad()
def _moves(
    new: Mapping[str, Tensor], old: Mapping[str, Tensor]
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Name and shape -> move, and -> its square, of a group of tensors at a time: moves are as large as the model."""
    floating = {name: value for name, value in new.items() if value.is_floating_point()}
    for names in grouped(floating):
        values = [floating[name].float() for name in names]
        moves = torch._foreach_sub(values, [old[name].to(values[0]) for name in names])
        keys = [name_and_shape(name, floating[name]) for name in names]
        squares = [square.sum() for square in torch._foreach_mul(moves, moves)]
        yield dict(zip(keys, moves, strict=True)), dict(zip(keys, squares, strict=True))
