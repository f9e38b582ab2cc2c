"""The base of methods whose clients train copies of global models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field
from torch import Tensor

from polyfed.aggregation.averaging import Averaging
from polyfed.aggregation.collaboration import Holder
from polyfed.algorithms.algorithm import Algorithm, Reply, client_query, each
from polyfed.core.effects import Only
from polyfed.core.errors import PayloadError
from polyfed.federation.client import Client
from polyfed.federation.cohort import Cohort
from polyfed.federation.server import Server
from polyfed.federation.types import Outline, outline_of
from polyfed.wire.payload import Weights


class GlobalModels(Algorithm):
    """Each type of clients has a global model, which its clients receive, train and are judged by."""

    local_epochs: Annotated[int, Only(local_steps=None)] = Field(
        default=5, ge=1, description="E, passes over private data a round"
    )
    local_steps: int | None = Field(
        default=None, ge=1, description="so many batches a round instead of whole passes; None: local_epochs"
    )

    @property
    def mixes_types(self) -> bool:
        """No: a global model comes of the clients of its type."""
        return False

    def setup(self, server: Server) -> None:
        """Start everybody from common initial weights."""
        server.share_weights()

    def shape_check(self, server: Server) -> ShapeCheck:
        """The check that a reply's weights are those of its sender's architecture."""
        return ShapeCheck(server)

    @property
    def is_personal(self) -> bool:
        """Clients are judged by the global model of their type."""
        return False

    def evaluate_clients(self, server: Server, cohort: Cohort) -> Mapping[str, Mapping[str, float]]:
        """Every asked client's test metrics of the global model of its type."""
        replies = cohort.ask(self.assess_global, weights=each(server.weights_for))
        return {reply.sender.id: reply.payload.scalars for reply in replies}  # type: ignore[misc]

    @client_query(float)
    def assess_global(self, client: Client, weights: Weights) -> Reply:
        """Evaluate the received model on the client's test samples."""
        client.load_weights(weights)
        return self.assess(client)


def average(server: Server, cohort: Cohort, replies: Iterable[Reply], averaging: Averaging) -> None:
    """Fold replies with ``weights`` and ``num_examples`` into the global models as they come."""
    # sequential means need the sizes before the first reply, so they count those who are asked
    asked: dict[str, float] = {}
    for client in cohort.clients:
        kind = server.type_of(client)
        asked[kind] = asked.get(kind, 0.0) + server.weight(client)
    exchange = averaging.start(server.weights, holders_of(server), asked)
    for reply in replies:
        exchange.add(server.type_of(reply.sender), reply.weights, reply.num_examples)
    server.update_weights(averaging.finish(exchange, server.weights, server.state))


def holders_of(server: Server) -> dict[str, Holder]:
    """The global models, as aggregation sees them."""
    return {
        name: Holder(
            kind.modalities,
            server.blueprints[kind.architecture].places,
            tuple(client.id for client in kind.clients),
        )
        for name, kind in server.types.items()
    }


def shapes_of(server: Server) -> dict[str, dict[str, tuple[int, ...]]]:
    """Type -> name -> shape of a tensor of its global model."""
    return {kind: {name: tuple(shape) for name, shape in server.shapes(kind).items()} for kind in server.types}


class ShapeCheck:
    """Raises PayloadError for a reply whose weights are not those of its sender's architecture."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __call__(self, reply: Reply) -> None:
        """Check a reply with ``weights``."""
        wrong = shape_mismatch(reply.weights, self._server.outline(self._server.type_of(reply.sender)))
        if wrong is not None:
            raise PayloadError(f"weights do not match the architecture, first at '{wrong}'")


def shape_mismatch(weights: Mapping[str, Tensor], outline: Outline) -> str | None:
    """The first tensor that is missing, too much, or of another shape or type of numbers than it must be; or None.

    Types of numbers are the server's: a mean takes on that of the first tensor in it.
    """
    received = outline_of(weights)
    return None if received == outline else min(name for name, _ in set(received.items()) ^ set(outline.items()))
