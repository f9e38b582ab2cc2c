"""Replies, and what they pass at the server before the method sees them, each thing a small class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf, prod
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.federation.trainer import first_not_finite
from polyfed.federation.types import Outline, outline_of
from polyfed.privacy.rules import ENOUGH, Clipping, median_norm, scaled, update_norm
from polyfed.wire.ledger import Channel
from polyfed.wire.limits import ReplySize
from polyfed.wire.messages import Cause, Failure, Request
from polyfed.wire.payload import Payload, Scalar, TensorBundle, Weights
from polyfed.wire.schema import StepSchema

_T = TypeVar("_T")
_Asked = TypeVar("_Asked", contravariant=True)  # an ask at the server, a step at a site
_SPARE = ReplySize(1 << 12, 1 << 24)  # for a field whose layout nothing tells before it comes


class Reply:
    """What a client step returns: bundles and scalars by name, read as attributes.

    Attributes:
        payload: what it says; on its way to the server, as it crosses.
        client: who sent it, once the server has received it.
        mixing: how far the server follows it, in (0, 1]; less than 1 for one that is late. Its ``weights`` are as if it
            were not.
        staleness: server steps since its sender was asked.
        step_losses: of the optimiser steps behind it, where its sender works in a process of the run itself.
    """

    def __init__(self, **fields: TensorBundle | Scalar) -> None:
        self.payload = Payload(fields)
        self.client: ClientInfo | None = None
        self.mixing, self.staleness = 1.0, 0
        self.step_losses: Sequence[Tensor | float] = ()

    @classmethod
    def received(cls, payload: Payload, client: ClientInfo, step_losses: Sequence[Tensor | float] = ()) -> Reply:
        """A reply as the server gets it."""
        reply = cls()
        reply.payload, reply.client, reply.step_losses = payload, client, step_losses
        return reply

    @property
    def sender(self) -> ClientInfo:
        """Who sent it."""
        if self.client is None:
            raise ValueError("a reply has a sender only once the server has received it")
        return self.client

    def __getattr__(self, name: str) -> Any:
        try:
            # through __dict__: to ask for ``self.payload`` would end here again if it is not set
            return self.__dict__["payload"].fields[name]
        except KeyError as error:
            raise AttributeError(f"the reply has no field '{name}'") from error


ReplyCheck = Callable[[Reply], None]
"""Raises PayloadError for a reply that must not be used."""


@dataclass(frozen=True)
class LayoutCheck:
    """A method's check of fields whose layout is known before a reply comes, so that no larger one is taken in.

    Attributes:
        layout: client -> field of its reply -> names, shapes and types of its tensors, as decoded.
        check: raises PayloadError for any other reply.
    """

    layout: Callable[[ClientInfo], Mapping[str, Outline]]
    check: ReplyCheck

    def __call__(self, reply: Reply) -> None:
        self.check(reply)

    def __and__(self, other: LayoutCheck) -> LayoutCheck:
        """Both checks, of different fields."""

        def check(reply: Reply) -> None:
            self(reply)
            other(reply)

        return LayoutCheck(lambda client: {**self.layout(client), **other.layout(client)}, check)


def tap(replies: Iterable[Reply], note: Callable[[Reply], None]) -> Iterator[Reply]:
    """The replies as they come, each shown to ``note`` just before it is used: none is held."""
    for reply in replies:
        note(reply)
        yield reply


@dataclass(frozen=True)
class each(Generic[_T]):  # noqa: N801 - reads as a word in cohort.ask(..., weights=each(...))
    """A field whose value differs from client to client."""

    of: Callable[[ClientInfo], _T]


@dataclass(frozen=True)
class Ask:
    """What replies answer.

    Attributes:
        schema: of the step.
        clients: who is in the round, in client order.
        fields: what is sent, the same for all or ``each``.
        channel: carries it.
        check: the method's own.
        accept: takes a client's reply, from which it goes on.
        clipped: is told of every client whose update is scaled down, with the reason.
        drop: puts a client out of the round.
        origins: field of a reply -> the weights that it starts from where these are not those sent.
        changes: fields of replies that hold changes of weights in place of new ones.
        sent: client -> what it was asked, before it was encoded; who has no reply yet may be missing.
        requests: client -> the same as it crosses.
    """

    schema: StepSchema
    clients: Sequence[ClientInfo]
    fields: Mapping[str, Any]
    channel: Channel
    check: ReplyCheck
    accept: Callable[[ClientInfo], None]
    clipped: Callable[[ClientInfo, str], None]
    drop: Callable[[ClientInfo, Failure], None]
    origins: Mapping[str, Weights | each[Weights]] = field(default_factory=dict)
    changes: Collection[str] = ()
    sent: dict[str, Payload] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    _last: dict[tuple[int, ...], Payload] = field(default_factory=dict)  # what several are asked is one payload

    @property
    def step(self) -> str:
        return self.schema.function.__name__

    def now(self, client: ClientInfo) -> Payload:
        """What a client is asked in this round, before it is encoded."""
        fields = {key: value.of(client) if isinstance(value, each) else value for key, value in self.fields.items()}
        if (key := tuple(map(id, fields.values()))) not in self._last:
            self._last.clear()
            self._last[key] = Payload(fields)
        return self._last[key]

    def start(self, client: ClientInfo, name: str) -> Mapping[str, Tensor]:
        """What the weights in a field of a client's reply started from; nothing for changes."""
        if name in self.changes:
            return {}
        origin = self.origins.get(name)
        start = origin.of(client) if isinstance(origin, each) else origin
        if start is None:
            start = self.sent[client.id].bundles.get(name)  # type: ignore[assignment]
        return start if isinstance(start, Weights) else {}

    def reply_size(self, client: ClientInfo, word: int | None = None) -> ReplySize | None:
        """Bound of a client's reply: encoding and compression only make it smaller.

        A field has the layout that the method's ``LayoutCheck`` gives. Of one that it does not know, as of a method of
        one's own, the bound is what is sent in a field of that name, or its weights start from, and _SPARE. None:
        nothing is.

        Args:
            client: who replies.
            word: bytes that each number takes in a sum, which is one tensor with a weight at its end.
        """
        known = self.check.layout(client) if isinstance(self.check, LayoutCheck) else {}
        tensors = size = 0
        for name in self.schema.bundles:
            outline = known.get(name)
            if outline is None:
                origin = self.origins.get(name, self.now(client).fields.get(name))
                start = origin.of(client) if isinstance(origin, each) else origin
                if not isinstance(start, TensorBundle):
                    return None
                outline, tensors, size = outline_of(start), tensors + _SPARE.tensors, size + _SPARE.bytes
            tensors += len(outline)
            size += sum(prod(shape) * (word or dtype.itemsize) for shape, dtype in outline.values())
        return ReplySize(tensors, size) if word is None else ReplySize(1, size + word)


class Filter(Protocol[_Asked]):
    """Passes replies on in order of arrival: unchanged, changed, or not at all; at the server and at a site alike."""

    def __call__(self, replies: Iterator[Reply], ask: _Asked, /) -> Iterator[Reply]: ...


def passed(replies: Iterator[Reply], filters: Iterable[Filter[_T]], ask: _T) -> Iterator[Reply]:
    """The replies after all filters, in this order."""
    for link in filters:
        replies = link(replies, ask)
    return replies


# ---- checks, each of which raises PayloadError for a reply that does not pass


class SchemaCheck:
    """Refuses what the step does not declare to return."""

    def __call__(self, reply: Reply, ask: Ask) -> None:
        ask.schema.require_reply(reply.payload)


class SizeCheck:
    """Refuses more than was asked for; engines whose replies cross a wire do so before they read them."""

    def __call__(self, reply: Reply, ask: Ask) -> None:
        if (most := ask.requests[reply.sender.id].reply_size) is not None:
            bundles = reply.payload.bundles.values()
            most.require([tensor.nbytes for bundle in bundles for tensor in bundle.values()])


class FiniteCheck:
    """Refuses NaN, and norms beyond the limits."""

    def __call__(self, reply: Reply, ask: Ask) -> None:
        reply.payload.require_sound(ask.channel.limits, lambda name: ask.start(reply.sender, name))


@dataclass(frozen=True)
class SampleCountCap:
    """Refuses more ``num_examples`` than a client joined with, and lets none count for more than it is to.

    Attributes:
        most: client -> samples that it counts for in averages, where these are fewer than it has.
    """

    most: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, reply: Reply, ask: Ask) -> None:
        examples, samples = reply.payload.scalars.get("num_examples"), reply.sender.samples
        if not isinstance(examples, int | float):
            return
        if not 0 <= examples <= samples:
            raise PayloadError(f"num_examples is {examples}, the client joined with {samples}")
        most = self.most.get(reply.sender.id, samples)
        if examples > most:
            reply.payload = Payload({**reply.payload.fields, "num_examples": most})


class MethodCheck:
    """Refuses what the method refuses, which may compute with tensors that are finite."""

    def __call__(self, reply: Reply, ask: Ask) -> None:
        ask.check(reply)


class SameShapes:
    """Refuses weights of other shapes or types than what they started from, and counters that fell."""

    def __call__(self, reply: Reply, ask: Ask) -> None:
        for name, bundle in reply.payload.bundles.items():
            start = ask.start(reply.sender, name) if isinstance(bundle, Weights) else {}
            for key, value in bundle.items():
                if key in start:
                    _require_same_shape(key, value, start[key])


def _require_same_shape(name: str, value: Tensor, old: Tensor) -> None:
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
class Checks:
    """Decodes and checks one reply at a time; nothing that follows refuses one.

    Whose reply does not pass is out of the round.

    Attributes:
        checks: in that order.
    """

    checks: Sequence[Callable[[Reply, Ask], None]]

    def __call__(self, replies: Iterator[Reply], ask: Ask) -> Iterator[Reply]:
        # unlike a loop, map lets go of a reply before it asks for the next
        return filter(None, map(lambda reply: self._checked(reply, ask), replies))

    def _checked(self, reply: Reply, ask: Ask) -> Reply | None:
        try:
            reply.payload = ask.channel.decoded(ask.requests[reply.sender.id], reply.payload)
            for check in self.checks:
                check(reply, ask)
        except PayloadError as error:
            text = f"{error}{first_not_finite(reply.step_losses)}"
            ask.drop(reply.sender, Failure(Cause.INVALID, text, error=error))
            return None
        reply.step_losses = ()  # a rule may hold many replies
        ask.accept(reply.sender)
        return reply


def checks(counted: Mapping[str, int]) -> Checks:
    """What every reply passes.

    Args:
        counted: client -> samples that it counts for, where these are fewer than it has.
    """
    # the method's before sizes, as it says more
    return Checks((SchemaCheck(), FiniteCheck(), SampleCountCap(counted), MethodCheck(), SameShapes(), SizeCheck()))


CHECKS: tuple[Filter[Ask], ...] = (checks({}),)


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

    def __call__(self, replies: Iterator[Reply], ask: Ask) -> Iterator[Reply]:
        if ask.schema.kind == "fresh":
            return replies
        medians = {key: median_norm(norms.values()) for key, norms in self.recent_norms.items()}
        return self._passed(replies, ask, medians)

    def _passed(self, replies: Iterator[Reply], ask: Ask, medians: Mapping[str, float | None]) -> Iterator[Reply]:
        norms: RecentNorms = {}
        # unlike a loop, map lets go of a reply before it asks for the next
        yield from map(lambda reply: self._clipped(reply, ask, medians, norms), replies)
        for key, latest in norms.items():
            older = {} if len(latest) >= ENOUGH else self.recent_norms.get(key, {})
            self.recent_norms[key] = older | latest

    def _clipped(self, reply: Reply, ask: Ask, medians: Mapping[str, float | None], norms: RecentNorms) -> Reply:
        fields, notes = dict(reply.payload.fields), []
        for name, bundle in reply.payload.bundles.items():
            start, key = ask.start(reply.sender, name), f"{ask.step}/{name}/{reply.sender.architecture}"
            norm = norms.setdefault(key, {})[reply.sender.id] = update_norm(bundle, start)
            median = medians.get(key)
            bound = inf if median is None else self.clipping.times * median
            if norm > bound:
                fields[name] = scaled(bundle, start, bound / norm)
                notes.append(f"{name}: {norm / bound:.3g} times as long as aggregation.clip lets it be")
        if notes:
            ask.clipped(reply.sender, "; ".join(notes))
            reply.payload = Payload(fields)
        return reply


# ---- how many samples a client counts for in averages, whatever it says it has


def counted(clients: Sequence[ClientInfo], times: float) -> dict[str, int]:
    """Client -> samples that it counts for in averages: as many as it joined with, at most ``times`` its median.

    That is of the clients of its architecture; where these are too few, of all that share a modality.
    """
    trained = [client for client in clients if client.samples > 0]  # those without samples would only lower it

    @cache
    def most(architecture: str, modalities: tuple[str, ...]) -> float:
        peers = [other.samples for other in trained if other.architecture == architecture]
        if len(peers) < ENOUGH:
            peers = [other.samples for other in trained if set(other.modalities) & set(modalities)]
        return times * median(peers) if len(peers) >= ENOUGH else inf

    return {client.id: int(min(client.samples, most(client.architecture, client.modalities))) for client in clients}
