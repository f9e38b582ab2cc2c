"""The base of methods whose clients train copies of global models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated

from pydantic import Field

from polyfed.aggregation.averaging import Averaging, Update
from polyfed.aggregation.collaboration import Holder
from polyfed.algorithms.algorithm import (
    Algorithm,
    Client,
    Cohort,
    LocalTraining,
    Reply,
    Server,
    Weights,
    client_query,
    each,
)
from polyfed.core.effects import Only
from polyfed.core.errors import PayloadError
from polyfed.federation.types import Outline, outline_of

ReplyCheck = Callable[[Reply], None]


class GlobalEvaluation(Algorithm):
    """Methods whose clients are judged by the global model of their type, and not by one of their own."""

    @property
    def is_personal(self) -> bool:
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


class GlobalModels(GlobalEvaluation):
    """Each type of clients has a global model, which its clients receive, train and are judged by."""

    local_epochs: Annotated[int, Only(local_steps=None)] = Field(
        default=5, ge=1, description="E, passes over private data a round"
    )
    local_steps: int | None = Field(
        default=None, ge=1, description="so many batches a round instead of whole passes; None: local_epochs"
    )

    @property
    def local_training(self) -> LocalTraining:
        """``local_epochs``, or ``local_steps`` if there are any."""
        return LocalTraining(self.local_epochs, self.local_steps)

    @property
    def mixes_types(self) -> bool:
        return False

    def setup(self, server: Server) -> None:
        server.share_weights()

    def shape_check(self, server: Server) -> ReplyCheck:
        return weights_check(server)


def weights_check(server: Server, part: Collection[str] | None = None) -> ReplyCheck:
    """Raises PayloadError for a reply whose ``weights`` are not all tensors (or the ``part``) of its sender's model.

    Types of numbers must be the server's as well as shapes: a mean takes on that of the first tensor in it.
    """

    @cache  # of a type, while one ask lasts
    def outline(kind: str) -> Outline:
        return {name: shape for name, shape in server.outline(kind).items() if part is None or name in part}

    def check(reply: Reply) -> None:
        expected = outline(server.type_of(reply.sender))
        # names too: a tensor too many would be averaged into the model
        received = outline_of(reply.weights)
        if received != expected:
            first = min(name for name, _ in set(received.items()) ^ set(expected.items()))
            fault = "do not match the architecture" if part is None else "are not the part that was asked for"
            raise PayloadError(f"weights {fault}, first at '{first}'")

    return check


def noted(replies: Iterable[Reply], note: Callable[[Reply], None]) -> Iterator[Reply]:
    """The replies as they come, each shown to ``note`` just before it is used: none is held."""
    for reply in replies:
        note(reply)
        yield reply


def average(server: Server, cohort: Cohort, replies: Iterable[Reply], averaging: Averaging) -> None:
    """Fold replies with ``weights`` and ``num_examples`` into the global models as they come."""
    # sequential means need the sizes before the first reply, so they count those who are asked
    asked: dict[str, float] = {}
    for client in cohort.clients:
        kind = server.type_of(client)
        asked[kind] = asked.get(kind, 0.0) + server.weight(client)

    def update(reply: Reply) -> Update:
        return server.type_of(reply.sender), reply.weights, reply.num_examples

    # unlike a loop, map lets go of a reply before it asks for the next
    updates = map(update, replies)
    server.update_weights(averaging.average(server.weights, holders_of(server), updates, asked, server.state))


def holders_of(server: Server) -> dict[str, Holder]:
    """The global models, as aggregation sees them."""
    return {
        name: Holder(
            kind.modalities,
            server.blueprints[kind.architecture].places,
            server.shapes(name),
            tuple(client.id for client in kind.clients),
        )
        for name, kind in server.types.items()
    }
