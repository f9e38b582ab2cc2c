"""What a client's reply passes at the server before the method sees it: one small class for each thing that is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import Protocol

from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.privacy.clipping import ENOUGH, Clipping, median_norm, scaled, update_norm
from polyfed.wire.ledger import Channel
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload, Weights
from polyfed.wire.schema import StepSchema


@dataclass(frozen=True)
class Received:
    """A reply on its way to the method.

    Attributes:
        client: who sent it.
        payload: what it says; before it is decoded, as it crossed.
        details: what else its site tells, for whoever looks for a fault.
        error: why there is none, or None.
        staleness: server steps between the model that its client started from and that of now.
        mixing: how far the server follows it, in (0, 1].
    """

    client: ClientInfo
    payload: Payload
    details: str = ""
    error: str | None = None
    staleness: int = 0
    mixing: float = 1.0


@dataclass(frozen=True)
class Ask:
    """What replies answer.

    Attributes:
        schema: of the step.
        clients: who is in the round, in client order.
        sent: client -> what it was asked, before it was encoded; who has no reply yet may be missing.
        requests: client -> the same as it crosses.
        now: what a client is asked in this round, before it is encoded.
        channel: carries both.
        origin: client and field of a reply -> the weights that it starts from where these are not those sent.
        changes: fields of replies that hold changes of weights in place of new ones.
        check: the method's own.
        accept: takes a client's reply, from which it goes on.
        clipped: is told of every client whose update is scaled down, with the reason.
        drop: puts a client out of the round, with the reason in a line and in detail.
    """

    schema: StepSchema
    clients: Sequence[ClientInfo]
    sent: dict[str, Payload]
    requests: dict[str, Request]
    now: Callable[[ClientInfo], Payload]
    channel: Channel
    origin: Callable[[ClientInfo, str], Mapping[str, Tensor] | None]
    changes: frozenset[str]
    check: Callable[[Payload, ClientInfo], None]
    accept: Callable[[ClientInfo], None]
    clipped: Callable[[ClientInfo, str], None]
    drop: Callable[[ClientInfo, str, str], None]

    @property
    def step(self) -> str:
        return self.schema.function.__name__

    def start(self, client: ClientInfo, name: str) -> Mapping[str, Tensor]:
        """What the weights in a field of a client's reply started from; nothing for changes."""
        if name in self.changes:
            return {}
        origin = self.origin(client, name)
        sent = self.sent[client.id].bundles.get(name) if origin is None else origin
        return sent if isinstance(sent, Weights) else {}


class Filter(Protocol):
    """Passes replies on, in the order in which they come: as they are, changed, or not at all."""

    def __call__(self, replies: Iterator[Received], ask: Ask) -> Iterator[Received]: ...


class Check(Protocol):
    """A filter that looks at one reply at a time."""

    def passed(self, payload: Payload, client: ClientInfo, ask: Ask) -> Payload:
        """What passes of a client's reply.

        Raises:
            PayloadError: nothing does.
        """


@dataclass(frozen=True)
class Checks:
    """Filters that look at one reply at a time, in one loop; whose reply does not pass is out of the round."""

    checks: Sequence[Check]

    def __call__(self, replies: Iterator[Received], ask: Ask) -> Iterator[Received]:
        for reply in replies:
            payload = reply.payload
            try:
                if reply.error is not None:
                    raise PayloadError(reply.error)
                for check in self.checks:
                    payload = check.passed(payload, reply.client, ask)
            except PayloadError as error:
                ask.drop(reply.client, str(error), reply.details)
            else:
                yield replace(reply, payload=payload)


class Decoded:
    """What a reply says, as its transport encodes it."""

    def passed(self, payload: Payload, client: ClientInfo, ask: Ask) -> Payload:
        return ask.channel.decoded(ask.requests[client.id], payload)


class SchemaCheck:
    """Refuses what the step does not declare to return."""

    def passed(self, payload: Payload, client: ClientInfo, ask: Ask) -> Payload:
        ask.schema.require_reply(payload)
        return payload


class FiniteCheck:
    """Refuses NaN, and norms beyond the limits."""

    def passed(self, payload: Payload, client: ClientInfo, ask: Ask) -> Payload:
        payload.require_sound(ask.channel.limits, lambda name: ask.start(client, name))
        return payload


class SameShapes:
    """Refuses weights of other shapes or types than what they started from, and counters that fell."""

    def passed(self, payload: Payload, client: ClientInfo, ask: Ask) -> Payload:
        for name, bundle in payload.bundles.items():
            if isinstance(bundle, Weights):
                _require_same_shapes(bundle, ask.start(client, name))
        return payload


def _require_same_shapes(new: Weights, start: Mapping[str, Tensor]) -> None:
    for name, value in new.items():
        if (old := start.get(name)) is None:
            continue
        if (value.dtype, value.shape) != (old.dtype, old.shape):
            types = [f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in (value, old)]
            raise PayloadError(
                f"tensor '{name}' is {types[0]}, sent was {types[1]}: types of numbers and shapes are the server's"
            )
        if not value.is_floating_point() and value.numel():
            fell = float((value.double() - old.to(value.device).double()).min())
            if fell < 0:
                raise PayloadError(f"tensor '{name}' of whole numbers fell by {-fell:g}, which no training does")


@dataclass(frozen=True)
class SampleCountCap:
    """Refuses more ``num_examples`` than a client joined with, and lets none count for more than it is to.

    Attributes:
        most: client -> samples that it counts for in averages, where these are fewer than it has.
    """

    most: Mapping[str, int] = field(default_factory=dict)

    def passed(self, payload: Payload, client: ClientInfo, ask: Ask) -> Payload:
        examples = payload.scalars.get("num_examples")
        if not isinstance(examples, int | float):
            return payload
        if not 0 <= examples <= client.samples:
            raise PayloadError(f"num_examples is {examples}, the client joined with {client.samples}")
        most = self.most.get(client.id, client.samples)
        return payload if examples <= most else Payload({**payload.fields, "num_examples": most})


class Checked:
    """Refuses what the method refuses."""

    def passed(self, payload: Payload, client: ClientInfo, ask: Ask) -> Payload:
        ask.check(payload, client)
        return payload


class Accepted:
    """Takes what is left: nothing that follows refuses a reply."""

    def passed(self, payload: Payload, client: ClientInfo, ask: Ask) -> Payload:
        ask.accept(client)
        return payload


def checks(counted: Mapping[str, int]) -> Checks:
    """What every reply passes, in that order: the method's check may compute with tensors that are sound.

    Args:
        counted: client -> samples that it counts for, where these are fewer than it has.
    """
    return Checks(
        (Decoded(), SchemaCheck(), FiniteCheck(), SampleCountCap(counted), Checked(), SameShapes(), Accepted())
    )


CHECKS: tuple[Filter, ...] = (checks({}),)


# ---- norm clipping


RecentNorms = dict[str, dict[str, float]]
"""Step, field and architecture -> client -> norm of its update in the last ask."""


@dataclass(frozen=True)
class NormClip:
    """Scales down what is far longer than usual, as it comes.

    Attributes:
        clipping: how long an update may be.
        recent_norms: those of the last ask of each step, brought up to date once all have passed; where it had too few
            for a median, as where the server steps after each reply, the latest ones of other clients too.
    """

    clipping: Clipping
    recent_norms: RecentNorms

    def __call__(self, replies: Iterator[Received], ask: Ask) -> Iterator[Received]:
        if ask.schema.kind == "fresh":
            return replies
        medians = {key: median_norm(norms.values()) for key, norms in self.recent_norms.items()}
        return self._passed(replies, ask, medians)

    def _passed(self, replies: Iterator[Received], ask: Ask, medians: Mapping[str, float | None]) -> Iterator[Received]:
        norms: RecentNorms = {}
        # unlike a loop, map lets go of a reply before it asks for the next
        yield from map(lambda reply: self._clipped(reply, ask, medians, norms), replies)
        for key, found in norms.items():
            older = {} if len(found) >= ENOUGH else self.recent_norms.get(key, {})
            self.recent_norms[key] = older | found

    def _clipped(self, reply: Received, ask: Ask, medians: Mapping[str, float | None], norms: RecentNorms) -> Received:
        fields, notes = dict(reply.payload.fields), []
        for name, bundle in reply.payload.bundles.items():
            start, key = ask.start(reply.client, name), f"{ask.step}/{name}/{reply.client.architecture}"
            norm = norms.setdefault(key, {})[reply.client.id] = update_norm(bundle, start)
            median = medians.get(key)
            bound = inf if median is None else self.clipping.times * median
            if norm > bound:
                fields[name] = scaled(bundle, start, bound / norm)
                notes.append(f"{name}: {norm / bound:.3g} times as long as aggregation.clip lets it be")
        if not notes:
            return reply
        ask.clipped(reply.client, "; ".join(notes))
        return replace(reply, payload=Payload(fields))


def counted(clients: Sequence[ClientInfo], times: float | None) -> dict[str, int]:
    """Client -> samples that it counts for in averages: as many as it joined with, at most ``times`` its median."""
    medians = _median_samples(clients)
    return {
        client.id: client.samples
        if times is None or client.id not in medians
        else min(client.samples, int(times * medians[client.id]))
        for client in clients
    }


def _median_samples(clients: Sequence[ClientInfo]) -> dict[str, float]:
    trained = [client for client in clients if client.samples > 0]  # those without samples would only lower it
    kinds = {(client.architecture, client.modalities): client for client in clients}
    peers = {kind: _peer_samples(client, trained) for kind, client in kinds.items()}
    medians = {kind: median(samples) for kind, samples in peers.items() if len(samples) >= ENOUGH}
    of_clients = ((client.id, medians.get((client.architecture, client.modalities))) for client in clients)
    return {client: value for client, value in of_clients if value is not None}


def _peer_samples(client: ClientInfo, trained: Sequence[ClientInfo]) -> list[int]:
    """Samples of the clients of one architecture; where these are too few, of all that share a modality."""
    own = [other.samples for other in trained if other.architecture == client.architecture]
    if len(own) >= ENOUGH:
        return own
    return [other.samples for other in trained if set(other.modalities) & set(client.modalities)]
