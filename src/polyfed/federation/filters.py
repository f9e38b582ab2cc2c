"""What a client's reply passes at the server before the method sees it: one small class for each thing that is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from statistics import median
from typing import Protocol

from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.privacy.clipping import (
    ENOUGH,
    Clipping,
    Norms,
    Usual,
    clipped,
    excess,
    lengths,
    medians,
    reach_of,
    room,
    update_norms,
)
from polyfed.wire.channel import Channel
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload, TensorBundle, Weights
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
        shorten: is told of every client whose update is scaled down, with the reason.
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
    shorten: Callable[[ClientInfo, str], None]
    drop: Callable[[ClientInfo, str, str], None]

    @cached_property
    def _decoder(self) -> Callable[[Payload], Payload]:
        return self.channel.transport.decoder(self.channel.limits)

    def received(self, client: ClientInfo) -> Payload | None:
        """The request as a client received it, if replies are encoded against it."""
        return self._decoder(self.requests[client.id].payload) if self.channel.transport.refers else None

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
        return ask.channel.decoded(ask.requests[client.id], payload, ask.received(client))


class AsDeclared:
    """Refuses what the step does not declare to return."""

    def passed(self, payload: Payload, client: ClientInfo, ask: Ask) -> Payload:
        ask.schema.require_reply(payload)
        return payload


class Sound:
    """Refuses NaN, and norms beyond the limits."""

    def passed(self, payload: Payload, client: ClientInfo, ask: Ask) -> Payload:
        payload.require_sound(ask.channel.limits, lambda name: ask.start(client, name))
        return payload


class Alike:
    """Refuses weights of other shapes or types than what they started from, and counters that fell."""

    def passed(self, payload: Payload, client: ClientInfo, ask: Ask) -> Payload:
        for name, bundle in payload.bundles.items():
            if isinstance(bundle, Weights):
                _require_alike(bundle, ask.start(client, name))
        return payload


def _require_alike(new: Weights, start: Mapping[str, Tensor]) -> None:
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
class Counted:
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
    return Checks((Decoded(), AsDeclared(), Sound(), Counted(counted), Checked(), Alike(), Accepted()))


CHECKS: tuple[Filter, ...] = (checks({}),)


# ---- norm clipping


Medians = dict[str, Usual]
"""Step, field and architecture -> what was usual there at the last ask."""
Few = dict[str, dict[str, Usual]]
"""The same -> client -> lengths of its last update, where too few have come since for a median."""


@dataclass(frozen=True)
class NormClip:
    """Scales down what is far longer than usual, as it comes, and what its sender counts for.

    Replies wait for each other only while nothing is known of changes that they hold, as in the first round of a method
    that has some: these may be as long as anything.

    Attributes:
        clipping: how long what may be.
        usual: what was, in the last ask of each step, or asks where one has too few replies; brought up to date once
            all have passed.
        few: what those asks had.
    """

    clipping: Clipping
    usual: Medians
    few: Few = field(default_factory=dict)

    def __call__(self, replies: Iterator[Received], ask: Ask) -> Iterator[Received]:
        if ask.schema.kind == "fresh":
            yield from replies
            return
        seen, waiting = _Seen(self.few), list[tuple[Received, Mapping[str, Norms]]]()
        for reply in replies:
            norms = seen.noted(reply, ask)
            if waiting or any(_key(reply, name, ask) not in self.usual for name in ask.changes):
                waiting.append((reply, norms))  # and all that follow, so that the order stays
            else:
                yield self._held(reply, norms, ask, self.usual)
        now = seen.medians()
        for reply, norms in waiting:
            yield self._held(reply, norms, ask, now | self.usual)
        for key, usual in now.items():
            # of changes the most is kept: first ones are long, and newcomers come at any time
            before = self.usual.get(key, {}) if key.split("/")[1] in ask.changes else {}
            self.usual[key] = {name: max(value, before.get(name, 0.0)) for name, value in usual.items()}
        seen.forget()

    def _held(self, reply: Received, norms: Mapping[str, Norms], ask: Ask, usual: Mapping[str, Usual]) -> Received:
        fields, notes, farthest = dict(reply.payload.fields), [], 1.0
        for name, bundle in reply.payload.bundles.items():
            bounds = self._bounds(reply, name, ask, usual.get(_key(reply, name, ask), {}))
            ratio, worst = excess(norms[name], bounds)
            if ratio > 1:
                farthest = max(farthest, ratio)
                tensors = clipped(bundle, ask.start(reply.client, name), norms[name], bounds)
                fields[name] = type(bundle)(tensors=tensors, **bundle.attributes())
                notes.append(f"{name}: '{worst}' moved {ratio:.3g} times as far as aggregation.clip lets it")
        if not notes:
            return reply
        examples = reply.payload.scalars.get("num_examples")
        if isinstance(examples, int):  # else a mean would count a reply of next to nothing as if all were well
            fields["num_examples"] = max(1, int(examples / farthest))
        ask.shorten(reply.client, "; ".join(notes))
        return replace(reply, payload=Payload(fields))

    def _bounds(self, reply: Received, name: str, ask: Ask, usual: Usual) -> Mapping[str, float]:
        bundle, times = reply.payload.bundles[name], self.clipping.times * self._more_samples(reply.client, ask)
        known = {tensor: times * room(tensor) * value for tensor, value in usual.items()}
        if not isinstance(bundle, Weights):
            return known
        sent = ask.sent[reply.client.id].bundles.get(name, {}) if name in ask.changes else ask.start(reply.client, name)
        own = reach_of(sent, bundle, reply.client.samples)
        if name in ask.changes:  # a change may be as long as what it changes
            return {tensor: max(value, own.get(tensor, 0.0)) for tensor, value in known.items()}
        counters = known.keys() - _entries(bundle).keys()  # count batches, which medians know better
        return {tensor: min(known.get(tensor, inf), own.get(tensor, inf)) for tensor in bundle} | {
            tensor: known[tensor] for tensor in counters
        }

    def _more_samples(self, client: ClientInfo, ask: Ask) -> float:
        """Times the usual samples that a client has: who has more trains for more steps, and comes as much farther."""
        peers = [other.samples for other in ask.clients if other.architecture == client.architecture and other.samples]
        if len(peers) < ENOUGH:
            return 1.0
        most = inf if self.clipping.weight is None else self.clipping.weight
        return min(max(client.samples / median(peers), 1.0), most)


@dataclass(frozen=True)
class _Seen:
    """Lengths of the updates of an ask, and of those before with too few, and what they say is usual."""

    lengths: Few
    entries: dict[str, Mapping[str, int]] = field(default_factory=dict)

    def noted(self, reply: Received, ask: Ask) -> Mapping[str, Norms]:
        """Norms of a reply's updates by field."""
        bundles = reply.payload.bundles
        norms = {name: update_norms(bundle, ask.start(reply.client, name)) for name, bundle in bundles.items()}
        for name, bundle in bundles.items():
            key = _key(reply, name, ask)
            self.lengths.setdefault(key, {})[reply.client.id] = lengths(norms[name])
            self.entries.setdefault(key, _entries(bundle))
        return norms

    def medians(self) -> Medians:
        found = {key: medians(list(self.lengths[key].values()), entries) for key, entries in self.entries.items()}
        return {key: usual for key, usual in found.items() if usual}

    def forget(self) -> None:
        """Let go of what has told a median."""
        for key in self.entries:
            if len(self.lengths[key]) >= ENOUGH:
                del self.lengths[key]


def _key(reply: Received, name: str, ask: Ask) -> str:
    return f"{ask.step}/{name}/{reply.client.architecture}"


def _entries(bundle: TensorBundle) -> Mapping[str, int]:
    if not isinstance(bundle, Weights):
        return {}
    return {name: value.numel() for name, value in bundle.items() if value.is_floating_point()}
