"""FedAvg, and what all methods share in which clients exchange weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny
from torch import Tensor

from polyfed.aggregation.collaboration import Holder, Layers, Range, Scope, require_exchangeable
from polyfed.aggregation.exchange import ExactExchange, Exchange, SequentialExchange
from polyfed.algorithms.algorithm import Algorithm, Reply, client_query, client_step, each
from polyfed.core.effects import SEVERAL, SEVERAL_TYPES, SINGLE, Not, Only, Where
from polyfed.core.errors import PayloadError
from polyfed.federation.client import Client
from polyfed.federation.cohort import Cohort
from polyfed.federation.server import Server
from polyfed.federation.types import Outline, outline_of
from polyfed.optim.server import ServerOptimizer
from polyfed.optim.servers.replace import Replace
from polyfed.wire.payload import Weights

EXCHANGES = Only(layers=Not("none"), range=Not("own")) & Where(SEVERAL_TYPES)
"""Types of clients average layers with each other."""


class FedAvg(Algorithm):
    """Federated averaging (McMahan et al. 2017, Algorithm 1), of one global model for each type of client.

    Clients of one architecture, task and classes are a type; their weights are averaged by sample count. What types
    exchange with each other is a rule over named slots: nothing by default; ``layers: encoder, range: modality``
    averages encoders over all who have the modality (CreamFL, section 4.1).

    Other methods that exchange weights derive from this class and replace what they change: the client half (``fit``),
    the rule's defaults, or the round.
    """

    local_epochs: Annotated[int, Only(local_steps=None)] = Field(
        default=5, ge=1, description="E, passes over private data a round"
    )
    local_steps: int | None = Field(
        default=None, ge=1, description="so many batches a round instead of whole passes; None: local_epochs"
    )
    layers: Annotated[Layers, Only(range=Not("own")) & Where(SEVERAL_TYPES)] = Field(
        default="none", description="what types of clients average with each other"
    )
    range: Annotated[Range, Only(layers=Not("none")) & Where(SEVERAL_TYPES)] = Field(
        default="own", description="with whom: own type, all who have the modality, or the stacks of all modalities"
    )
    compensation: Annotated[bool, EXCHANGES] = Field(
        default=False, description="scale the other layers as those that are averaged between types (FedCola)"
    )
    factor: Annotated[float, EXCHANGES & Where(SINGLE) & Where(SEVERAL)] = Field(
        default=1.0, gt=0, le=1e6, description="on sample counts of clients with several modalities (FedIoT: 100)"
    )
    denominator: Annotated[Literal["slot", "model"], EXCHANGES & Only(compensation=False) & Where(SEVERAL)] = Field(
        default="slot", description="without compensation: shares add up to one; model: as FedCola's released code"
    )
    names: Annotated[Literal["role", "released"], EXCHANGES & Only(layers={"blocks", "mlp"})] = Field(
        default="role", description="layers by role; released: as FedCola's code matches names (no attention in blocks)"
    )
    averaging: Literal["exact", "sequential"] = Field(
        default="exact", description="weighted mean, or one client after the other into the running model, as released"
    )
    server_optimizer: SerializeAsAny[ServerOptimizer] = Field(
        default=Replace(),
        description="how the global models follow the averages: replace, momentum, adam, yogi, adagrad",
    )

    # ---- server half

    def setup(self, server: Server) -> None:
        """Everybody starts from common initial weights.

        Raises:
            ConfigError: types that are to exchange layers cannot.
        """
        shapes = {kind: {name: tuple(shape) for name, shape in server.shapes(kind).items()} for kind in server.types}
        require_exchangeable(self.holders(server), shapes, self.scope)
        server.share_weights()

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast, train, average: w <- sum_k n_k w_k / sum_k n_k."""
        self.aggregate(server, cohort, cohort.ask(self.fit, check=self.like(server), weights=each(server.weights_for)))

    def aggregate(self, server: Server, cohort: Cohort, replies: Iterable[Reply]) -> None:
        """Fold replies with ``weights`` and ``num_examples`` into the global models as they come."""
        exchange = self.exchange(server, cohort)
        for reply in replies:
            exchange.add(server.type_of(reply.sender), reply.weights, reply.num_examples)
        server.update_weights(self.server_optimizer.step(server.weights, exchange.result(), server.state))

    @property
    def scope(self) -> Scope:
        """Which slots types exchange, and how."""
        return Scope(self.layers, self.range, self.compensation, self.factor, self.denominator, self.names)

    @property
    def mixes_types(self) -> bool:
        """Only where types exchange layers."""
        return self.layers != "none" and self.range != "own"

    def holders(self, server: Server) -> dict[str, Holder]:
        """The global models, as aggregation sees them."""
        return {
            name: Holder(
                kind.modalities,
                server.blueprints[kind.architecture].places,
                tuple(client.id for client in kind.clients),
            )
            for name, kind in server.types.items()
        }

    def exchange(self, server: Server, cohort: Cohort) -> Exchange:
        """Where this round's replies go."""
        if self.averaging == "exact":
            return ExactExchange(server.weights, self.holders(server), self.scope)
        asked: dict[str, float] = {}
        for client in cohort.clients:
            kind = server.type_of(client)
            asked[kind] = asked.get(kind, 0.0) + server.weight(client)
        return SequentialExchange(server.weights, self.holders(server), self.scope, asked)

    def like(self, server: Server) -> ShapeCheck:
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

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the received model on the client's own task."""
        client.load_weights(weights)
        self.train(client)
        return Reply(weights=Weights(client.model.state_dict()), num_examples=client.num_examples)

    def train(self, client: Client) -> None:
        """Local training; what most methods replace."""
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)

    @client_query(float)
    def assess_global(self, client: Client, weights: Weights) -> Reply:
        """Evaluate the received model on the client's test samples."""
        client.load_weights(weights)
        return self.assess(client)


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
    found = outline_of(weights)
    return None if found == outline else min(name for name, _ in set(found.items()) ^ set(outline.items()))
