"""Replies, their contract, and the filters that they pass before the method uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf, prod
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from polyfed.aggregation.mean import accumulator
from polyfed.core.errors import ConfigError, ExchangeError, PayloadError, nearest
from polyfed.federation.client import ClientInfo
from polyfed.federation.trainer import first_not_finite
from polyfed.federation.types import by_architecture, outline_of, require_outline
from polyfed.privacy.rules import ENOUGH, Clipping, RobustRule, median_norm, scaled, update_norm
from polyfed.wire.ledger import Channel
from polyfed.wire.limits import ReplySize
from polyfed.wire.messages import Cause, Failure, Request
from polyfed.wire.payload import Payload, PublicRows, Representations, Scalar, TensorBundle, Weights
from polyfed.wire.schema import StepSchema

_T = TypeVar("_T")
_Asked = TypeVar("_Asked", contravariant=True)  # an ask at the server, a step at a site


class Reply:
    """Result of a client step: bundles and scalars by name, read as attributes.

    The server's side has a reply until it requests the next one, so that one is alive at a time: whatever outlives the
    loop is copied out of it, or a reference to its bundle is kept.

    Attributes:
        payload: fields of the reply; on its way to the server, as they cross.
        client: sender, once the server has received the reply.
        type: name of the sender's type of clients.
        mixing: how far the server follows it, in (0, 1]; below 1 for a late reply. Its ``weights`` are as if it were
            not.
        staleness: server steps since its sender was asked.
        step_losses: losses of the optimiser steps behind it, where the sender works in a process of the run itself.
    """

    def __init__(self, **fields: TensorBundle | Scalar) -> None:
        self.payload = Payload(fields)
        self.client: ClientInfo | None = None
        self.type = ""
        self.mixing, self.staleness = 1.0, 0
        self.step_losses: Sequence[Tensor | float] = ()

    @classmethod
    def received(cls, payload: Payload, client: ClientInfo, step_losses: Sequence[Tensor | float] = ()) -> Reply:
        """Reply as the server receives it."""
        reply = cls()
        reply.payload, reply.client, reply.step_losses = payload, client, step_losses
        return reply

    @property
    def sender(self) -> ClientInfo:
        """Client that sent the reply."""
        if self.client is None:
            raise ValueError("a reply has a sender only once the server has received it")
        return self.client

    def release(self) -> None:
        """Drop the tensors; scalars stay."""
        self.payload = Payload(self.payload.scalars)

    def __getattr__(self, name: str) -> Any:
        # through __dict__: to ask for ``self.payload`` would end here again if it is not set
        fields = self.__dict__["payload"].fields if "payload" in self.__dict__ else {}
        if name not in fields:
            released = "or its tensors have been released"
            raise AttributeError(f"the reply has no field '{name}', {released}; {nearest(name, fields)}")
        return fields[name]


@dataclass(frozen=True)
class each(Generic[_T]):  # noqa: N801 - reads as a word in cohort.ask(..., weights=each(...))
    """A field whose value differs between clients."""

    of: Callable[[ClientInfo], _T]


Expected = TensorBundle | each[Any]
"""A bundle that a field of a reply is laid out like, the same for all clients or ``each``."""


@dataclass(frozen=True)
class Ask:
    """One request to the clients of a round, and the contract of their replies.

    A field of a reply is laid out like ``like`` or ``changes`` define it; by default like the field of that name in the
    request, of representations those of the client's modalities.

    Attributes:
        schema: declaration of the step.
        clients: clients in the round, in client order.
        fields: fields of the request, the same for all or ``each``.
        channel: channel to the clients.
        check: method's own check of a reply, which raises PayloadError.
        accept: accepts a client's reply, from which its state goes on.
        clipped: receives every client whose update is scaled down, with the reason.
        drop: excludes a client from the round.
        like: field of a reply -> bundle of the same names, shapes and types; of weights, also what they start from.
        changes: field of a reply that holds changes -> the weights, some of which they change.
        sent: client -> its request before encoding; clients without a reply yet may be missing.
        requests: client -> the same, encoded.
    """

    schema: StepSchema
    clients: Sequence[ClientInfo]
    fields: Mapping[str, Any]
    channel: Channel
    check: Callable[[Reply], None]
    accept: Callable[[ClientInfo], None]
    clipped: Callable[[ClientInfo, str], None]
    drop: Callable[[ClientInfo, Failure], None]
    like: Mapping[str, Expected] = field(default_factory=dict)
    changes: Mapping[str, Expected] = field(default_factory=dict)
    sent: dict[str, Payload] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    _last: dict[tuple[int, ...], Payload] = field(default_factory=dict)  # what several are asked is one payload

    @property
    def step(self) -> str:
        return self.schema.name

    def now(self, client: ClientInfo) -> Payload:
        """Request to a client with the server's present state, before encoding."""
        fields = {key: value.of(client) if isinstance(value, each) else value for key, value in self.fields.items()}
        if (key := tuple(map(id, fields.values()))) not in self._last:
            self._last.clear()
            self._last[key] = Payload(fields)
        return self._last[key]

    def expected(self, client: ClientInfo, name: str) -> TensorBundle | None:
        """Bundle that a field of a client's reply is laid out like; None: nothing is known of it."""
        given = self.like.get(name, self.changes.get(name))
        if given is not None:
            bundle: TensorBundle = given.of(client) if isinstance(given, each) else given
            return bundle
        sent = (self.sent.get(client.id) or self.now(client)).bundles.get(name)
        if isinstance(sent, Representations):
            own = {key: rows for key, rows in sent.items() if key.rpartition("/")[2] in client.modalities}
            return replace(sent, tensors=own)
        return sent or None  # empty weights stand for those that the client keeps

    def start(self, client: ClientInfo, name: str) -> Mapping[str, Tensor]:
        """Weights that a field of a client's reply started from; none for changes."""
        start = None if name in self.changes else self.expected(client, name)
        return start if isinstance(start, Weights) else {}

    def require(self, reply: Reply) -> None:
        """Raise PayloadError unless the tensors of a reply have the names, shapes and types that were asked for."""
        for name, bundle in reply.payload.bundles.items():
            expected = self.expected(reply.sender, name)
            if type(bundle) is not type(expected):
                continue
            if isinstance(bundle, PublicRows) and isinstance(expected, PublicRows):
                bundle.require(expected.order, {key: tuple(rows.shape) for key, rows in expected.items()})
                continue
            try:
                outline = outline_of(expected)
                if name in self.changes:
                    outline = {k: outline[k] for k in bundle if k in outline and outline[k][1].is_floating_point}
                require_outline(bundle, outline)
            except PayloadError as error:
                raise PayloadError(f"{name} are not what was asked for, {error}") from error
            if name not in self.changes and bundle.has_fallen(expected):
                for key in bundle:
                    _require_risen(key, bundle[key], expected[key])
        self.check(reply)

    def reply_size(self, client: ClientInfo, word: int | None = None) -> ReplySize | None:
        """Largest reply of a client, as encoding and compression only make it smaller; None: unknown.

        Args:
            client: sender of the reply.
            word: bytes of each number in a sum, which is one tensor with a weight at its end.
        """
        bundles = [self.expected(client, name) for name in self.schema.bundles]
        outlines = [outline_of(bundle) for bundle in bundles if bundle is not None]
        if len(outlines) < len(bundles):
            return None
        specs = [spec for outline in outlines for spec in outline.values()]
        size = sum(prod(shape) * (word or dtype.itemsize) for shape, dtype in specs)
        return ReplySize(len(specs), size) if word is None else ReplySize(1, size + word)


class Filter(Protocol[_Asked]):
    """Passes replies on in order of arrival: unchanged, changed, or not at all; at the server and at a site alike."""

    def __call__(self, replies: Iterator[Reply], ask: _Asked, /) -> Iterator[Reply]: ...


def passed(replies: Iterator[Reply], filters: Iterable[Filter[_T]], ask: _T) -> Iterator[Reply]:
    """The replies after all filters, in this order."""
    for link in filters:
        replies = link(replies, ask)
    return replies


# ---- checks


def _require_risen(name: str, value: Tensor, old: Tensor) -> None:
    """Raise PayloadError for counters that fell."""
    if not value.is_floating_point() and value.numel() and not old.is_meta:
        fell = float((value.double() - old.to(value.device).double()).min())
        if fell < 0:
            raise PayloadError(f"tensor '{name}' of whole numbers fell by {-fell:g}, which no training does")


@dataclass(frozen=True)
class Checks:
    """Decodes and checks one reply at a time; no later filter refuses one.

    The sender of a reply that does not pass is out of the round.

    Attributes:
        counted: client -> samples that it counts for in averages, where these are fewer than it has.
    """

    counted: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, replies: Iterator[Reply], ask: Ask) -> Iterator[Reply]:
        # unlike a loop, map lets go of a reply before it asks for the next
        return filter(None, map(lambda reply: self._checked(reply, ask), replies))

    def _checked(self, reply: Reply, ask: Ask) -> Reply | None:
        try:
            reply.payload = ask.channel.decoded(ask.requests[reply.sender.id], reply.payload)
            ask.schema.require_reply(reply.payload)
            reply.payload.require_sound(ask.channel.limits, lambda name: ask.start(reply.sender, name))
            self._cap_examples(reply)
            ask.require(reply)
        except PayloadError as error:
            text = f"{error}{first_not_finite(reply.step_losses)}"
            ask.drop(reply.sender, Failure(Cause.INVALID, text, error=error))
            return None
        reply.step_losses = ()  # a rule may hold many replies
        ask.accept(reply.sender)
        return reply

    def _cap_examples(self, reply: Reply) -> None:
        """Refuse more ``num_examples`` than a client joined with, and let no client count for more than it may."""
        examples, samples = reply.payload.scalars.get("num_examples"), reply.sender.samples
        if not isinstance(examples, int | float):
            return
        if not 0 <= examples <= samples:
            raise PayloadError(f"num_examples is {examples}, the client joined with {samples}")
        most = self.counted.get(reply.sender.id, samples)
        if examples > most:
            reply.payload = Payload({**reply.payload.fields, "num_examples": most})


# ---- norm clipping


RecentNorms = dict[str, dict[str, float]]
"""Maps step, field and architecture to the norms of clients' updates in the last ask, by client."""


@dataclass(frozen=True)
class NormClip:
    """Scales down updates that are far longer than usual, one at a time.

    Attributes:
        clipping: bound of the norm of an update.
        recent_norms: norms of the last ask of each step, updated once all replies have passed; where it had too few for
            a median, as where the server steps after each reply, also the latest of other clients.
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
                notes.append(f"{name}: {norm / bound:.3g} times as long as aggregation.clip allows")
        if notes:
            ask.clipped(reply.sender, "; ".join(notes))
            reply.payload = Payload(fields)
        return reply


# ---- the number of samples that a client counts for in averages


def counted(clients: Sequence[ClientInfo], times: float) -> dict[str, int]:
    """Maps clients to the samples that they count for in averages: at most ``times`` the median.

    The median is over clients of one architecture; where these are too few, over all that share a modality.
    """
    trained = [client for client in clients if client.samples > 0]  # those without samples would only lower it

    @cache
    def most(architecture: str, modalities: tuple[str, ...]) -> float:
        peers = [other.samples for other in trained if other.architecture == architecture]
        if len(peers) < ENOUGH:
            peers = [other.samples for other in trained if set(other.modalities) & set(modalities)]
        return times * median(peers) if len(peers) >= ENOUGH else inf

    return {client.id: int(min(client.samples, most(client.architecture, client.modalities))) for client in clients}


# ---- robust rules
#
# Every reply of a type of clients leaves with the rule's result for that type. So any mean that a method makes of them
# is, within a type, the rule's result, whatever crosses and however the method weighs; between types it is its own.


def require_enough(rule: RobustRule, clients: Sequence[ClientInfo], when: str) -> None:
    """Check that each type has enough clients for a rule and the false clients that it tolerates.

    Raises:
        ConfigError: a type has too few clients.
    """
    for members in by_architecture(clients).values():
        false = rule.false_clients(len(members))
        if len(members) < rule.required(false):
            raise ConfigError(f"{when}: {_too_few(rule, false, members, len(members))}")


def _too_few(rule: RobustRule, false: int, members: Sequence[ClientInfo], asked: int) -> str:
    groups, names = "+".join(sorted({client.group for client in members})), ", ".join(client.id for client in members)
    return (
        f"aggregation.robust '{rule.component_name()}' that tolerates {false} of {asked} clients of a type needs "
        f"{rule.required(false)} replies of it, and type '{groups}' has {len(members)} ({names}); ask more clients, "
        "lower aggregation.robust.tolerated, or choose another rule"
    )


@dataclass(frozen=True)
class RobustReplies:
    """Filter that replaces the tensors of a type's replies by the rule's result; they wait for each other.

    Attributes:
        rule: robust rule applied to each tensor.
    """

    rule: RobustRule

    def __call__(self, replies: Iterator[Reply], ask: Ask) -> Iterator[Reply]:
        """Replies of the same senders, type by type; replies without tensors pass unchanged.

        Raises:
            ExchangeError: fewer clients of a type replied than the rule needs.
        """
        if ask.schema.kind == "fresh":
            yield from replies
            return
        waiting: dict[str, list[Reply]] = {}
        positions = {client.id: k for k, client in enumerate(ask.clients)}
        last = {client.architecture: k for k, client in enumerate(ask.clients)}
        for reply in replies:
            if reply.payload.bundles:
                waiting.setdefault(reply.sender.architecture, []).append(reply)
            else:
                yield reply
            # replies come in client order: of a type whose last client is behind us, no more will come
            for architecture in [name for name in waiting if last[name] <= positions[reply.sender.id]]:
                yield from self._of_type(waiting.pop(architecture), ask)
        for sent in waiting.values():
            yield from self._of_type(sent, ask)

    def _of_type(self, sent: Sequence[Reply], ask: Ask) -> Iterator[Reply]:
        members = [reply.sender for reply in sent]
        asked = sum(client.architecture == members[0].architecture for client in ask.clients)
        false = self.rule.false_clients(asked)
        if len(sent) < self.rule.required(false):
            raise ExchangeError(f"'{ask.step}': {_too_few(self.rule, false, members, asked)}")
        fields = {name: self._bundles(name, sent, false, ask.step) for name in sent[0].payload.bundles}
        for k, reply in enumerate(sent):
            own = {name: bundles[k] for name, bundles in fields.items()}
            reply.payload = Payload({**reply.payload.fields, **own})
            yield reply

    def _bundles(self, name: str, sent: Sequence[Reply], false: int, step: str) -> list[TensorBundle]:
        """New bundle of each sender."""
        bundles = [reply.payload.bundles[name] for reply in sent]
        for reply, bundle in zip(sent, bundles, strict=True):
            if bundle.specs != bundles[0].specs:
                what = f"'{step}': {name} of {reply.sender.id} have other tensors than those of {sent[0].sender.id}"
                raise ExchangeError(f"{what}, which is of its type; aggregation.robust compares tensor by tensor")
        tensors = _combined(self.rule, bundles, false)
        return [type(bundle)(tensors=tensors, **bundle.attributes()) for bundle in bundles]


def _combined(rule: RobustRule, bundles: Sequence[TensorBundle], false: int) -> dict[str, Tensor]:
    """Result for bundles of equal tensors; of counters, which are whole numbers, the median."""
    first = bundles[0]
    floating = [name for name, value in first.items() if value.is_floating_point()]
    values = [[bundle[name].to(accumulator(first[name].dtype)) for name in floating] for bundle in bundles]
    made = dict(zip(floating, rule.combined(values, false) if floating else (), strict=True))
    result = {}
    for name, value in first.items():
        # the lower of two in the middle: a whole number that a client counted
        if name not in made:
            made[name] = torch.stack([bundle[name].long() for bundle in bundles]).median(0).values
        result[name] = made[name].to(value.dtype)
    return result
