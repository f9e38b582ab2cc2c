"""An ask whose replies a test makes, for filters that stand alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyfed.federation.client import ClientInfo
from polyfed.federation.filters import Ask, Reply
from polyfed.wire.ledger import Channel, Ledger
from polyfed.wire.messages import Answer
from polyfed.wire.payload import Payload, TensorBundle, Weights
from polyfed.wire.schema import client_step, schema_of
from polyfed.wire.transport import Transport


@client_step(weights=Weights)
def fit(self: object, client: object, weights: Weights) -> Reply:
    raise AssertionError("no client performs it")


def ask_of(
    clients: Sequence[ClientInfo],
    sent: Mapping[str, TensorBundle] | None = None,
    changes: Mapping[str, Weights] | None = None,
    like: Mapping[str, Weights] | None = None,
    told: dict[str, str] | None = None,
) -> Ask:
    """An ask of these clients with one request; ``told`` gets the clipped or dropped clients, with the reason."""

    def nobody(*_: Any) -> Iterator[Answer]:
        raise AssertionError("no engine is here")

    notes: dict[str, str] = {} if told is None else told
    return Ask(
        schema=schema_of(fit),
        clients=clients,
        fields=dict(sent or {}),
        channel=Channel(nobody, Transport(), Ledger()),
        check=lambda reply: None,
        accept=lambda client: None,
        clipped=lambda client, reason: notes.update({client.id: reason}),
        drop=lambda client, failure: notes.update({client.id: failure.text}),
        like=like or {},
        changes=changes or {},
        sent={client.id: Payload(dict(sent or {})) for client in clients},
    )
