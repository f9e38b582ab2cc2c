"""What methods do with the global models of types of clients: check replies against them, and average into them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from typing import Annotated

from pydantic import Field, SerializeAsAny

from polyfed.aggregation.averaging import Averaging
from polyfed.aggregation.mean import GlobalModel, Update
from polyfed.algorithms.algorithm import Cohort, Reply, Server
from polyfed.core.errors import PayloadError
from polyfed.federation.types import Outline, outline_of

ReplyCheck = Callable[[Reply], None]

LocalEpochs = Annotated[int, Field(ge=1, description="E, passes over private data a round")]
LocalSteps = Annotated[
    int | None, Field(ge=1, description="so many batches a round instead of whole passes; None: local_epochs")
]
WeightAveraging = Annotated[
    SerializeAsAny[Averaging],
    Field(description="how trained weights become the global models: by_type, by_slot, fedcola, fediot"),
]


def start_averaging(server: Server, averaging: Averaging) -> None:
    """Start everybody from common initial weights.

    Raises:
        ConfigError: types that are to average layers with each other cannot.
    """
    averaging.require(global_models(server))
    server.share_weights()


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
    averages = averaging.average(server.weights, global_models(server), updates, asked)
    server.update_weights(averaging.server_optimizer.step(server.weights, averages, server.state))


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


def global_models(server: Server) -> dict[str, GlobalModel]:
    """The global models, as aggregation sees them."""
    return {
        name: GlobalModel(
            kind.modalities,
            server.blueprints[kind.architecture].places,
            server.shapes(name),
            tuple(client.id for client in kind.clients),
        )
        for name, kind in server.types.items()
    }
