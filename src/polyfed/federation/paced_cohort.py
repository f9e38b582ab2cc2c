"""Rounds that end before all have replied: whose replies they take, and what late ones are worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from polyfed.core.randomness import generator
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort
from polyfed.federation.filters import Ask, Reply
from polyfed.federation.paces import Buffered
from polyfed.federation.timeline import DROPPED, LOST, REPLIED, AtWork, Timeline
from polyfed.wire.messages import StateVersion
from polyfed.wire.payload import Payload, Weights

# torch's own names, and running means of classes
_STATISTICS = ("running_mean", "running_var", "running_sums", "running_mass")


@dataclass(kw_only=True)
class PacedCohort(Cohort):
    """The clients that may be started in a round, and those at work since earlier ones.

    ``ask`` starts who is idle with what the server has now, and yields the replies that come next, late ones as
    ``LateReplies`` makes them. What clients do depends on their requests alone, so that in virtual time a step is
    performed when its reply is due.

    Attributes:
        pace: when the round ends.
        timeline: of the run.
        everybody: all clients, in client order.
        seed: of the run, for the order in which clients are started if not all may be at work.
        replied: whose replies were accepted in this round, in that order.
        versions: client whose reply has come in this round -> what its step leaves of its state.
    """

    pace: Buffered
    timeline: Timeline
    everybody: tuple[ClientInfo, ...]
    seed: int
    replied: list[ClientInfo] = field(default_factory=list)
    versions: dict[str, StateVersion] = field(default_factory=dict)

    def replies(self, ask: Ask, phase: int) -> Iterator[Reply]:
        """Start who is idle; what comes until the round is full, or nobody is at work."""
        self._start(ask, phase)
        # as long as replies are refused, more are waited for
        while due := self._due(ask, phase):
            yield from self._replied(ask, due)

    def accept(self, client: ClientInfo, step: str, phase: int | None) -> None:
        self.replied.append(client)
        super().accept(client, step, phase)

    @property
    def awaited(self) -> set[str]:
        return super().awaited | self.timeline.at_work.keys()

    @property
    def heard(self) -> set[str]:
        return {client.id for client in self.replied}

    def may_have_changed(self, asked: set[str]) -> set[str]:
        return self.heard

    def version(self, client: ClientInfo, phase: int) -> StateVersion:
        return self.versions[client.id]

    def _start(self, ask: Ask, phase: int) -> None:
        """Start idle clients, each once a round, as many as may be at work."""
        most = len(self.everybody) if self.pace.concurrency is None else self.pace.concurrency
        busy = self.timeline.at_work.keys() | self.versions.keys()
        idle = [name for name in self._order if name not in busy]
        started = {*idle[: max(0, most - len(self.timeline.at_work))]}
        sent = {client.id: ask.now(client) for client in self.clients if client.id in started}
        if not sent:
            return
        self.listener.asking(ask.step, list(sent))
        for name, request in self.requests(ask, phase, sent).items():
            self.timeline.start(replace(request, payload=sent[name]))

    @cached_property
    def _order(self) -> list[str]:
        """Who may be started in this round, in the order in which they are while not all may be at work."""
        names = [client.id for client in self.clients]
        if self.pace.concurrency is None:
            return names
        drawn = torch.randperm(len(names), generator=generator(self.seed, self.round, "started")).tolist()
        return [names[place] for place in drawn]

    def _due(self, ask: Ask, phase: int) -> list[AtWork]:
        """Whose replies fill the round, in the order in which these come, and are not too old."""
        due: list[AtWork] = []
        while len(self.replied) + len(due) < self.pace.most(self.everybody):
            if not self.timeline.is_due:  # nobody is started between two replies that come at one time
                self._start(ask, phase)
            if (coming := self.timeline.next()) is None:
                break
            request = coming.request
            if self.pace.max_staleness is not None and self.round - request.round > self.pace.max_staleness:
                error = None
                if self.timeline.is_real:  # it has crossed; in virtual time it is not even computed
                    asked = replace(coming.request, payload=self.channel.transport.encode(coming.request.payload))
                    (answer,) = self.channel.exchange([asked], self.reply_policy(asked.step).deadline)
                    error = answer.failure.text if answer.failure is not None else None
                    now = replace(asked, round=self.round)
                    self.channel.refused(now, answer.refused_bytes)
                    if answer.payload is not None:
                        self.channel.dropped(now, answer.payload)
                self.timeline.note(DROPPED, coming.request, self.round, coming.ends, error)
                continue
            self.versions[request.client] = request.round, request.phase
            due.append(coming)
        return due

    def _replied(self, ask: Ask, due: Sequence[AtWork]) -> Iterator[Reply]:
        encode = self.channel.transport.encoder()
        clients = {client.id: client for client in self.everybody}
        work = {one.request.client: one for one in due}
        asked = [replace(one.request, payload=encode(one.request.payload)) for one in due]
        for one, request in zip(due, asked, strict=True):
            ask.sent[request.client] = one.request.payload
            # bytes of a reply belong to the round in which it comes
            ask.requests[request.client] = replace(request, round=self.round)
        for answer in self.channel.exchange(asked, self.reply_policy(ask.step).deadline):
            one, before = work[answer.client], len(self.replied)
            reply, failure = self.received(ask, clients[answer.client], answer), answer.failure
            if reply is not None:
                reply.staleness = self.round - one.request.round
                yield reply
            event = REPLIED if len(self.replied) > before else LOST
            self.timeline.note(event, one.request, self.round, one.ends, failure.text if failure else None)


@dataclass(frozen=True)
class LateReplies:
    """Makes of each reply what its sender would have sent had it started from the model of now; see ``Buffered``.

    So every mean that a method makes of them is the pace's: with shares p_c, the mean of W + s_c (W_c - W_v) is
    W + sum p_c s_c (W_c - W_v); running statistics are mixed with those of now. What a method makes of representations
    is its own, by ``Reply.mixing``.
    """

    pace: Buffered

    def __call__(self, replies: Iterator[Reply], ask: Ask) -> Iterator[Reply]:
        if ask.schema.kind == "fresh":  # initial weights are of no round
            return replies
        # unlike a loop, map lets go of a reply before it asks for the next
        return map(lambda reply: self._now(reply, ask), replies)

    def _now(self, reply: Reply, ask: Ask) -> Reply:
        reply.mixing = self.pace.staleness.weight(reply.staleness)
        if reply.staleness == 0:  # the very bits
            return reply
        fields = dict(reply.payload.fields)
        for name, bundle in reply.payload.bundles.items():
            if isinstance(bundle, Weights):
                fields[name] = self._put(bundle, name, reply, ask)
        reply.payload = Payload(fields)
        return reply

    def _put(self, trained: Weights, name: str, reply: Reply, ask: Ask) -> Weights:
        if name in ask.changes:
            return Weights({key: value * reply.mixing for key, value in trained.items()})
        now = ask.now(reply.sender).bundles[name]
        then = ask.start(reply.sender, name)
        # differences of running statistics do not add up: a variance would become negative
        starts = {key: now[key] if key.endswith(_STATISTICS) else then[key] for key in trained}
        return Weights({key: moved(now[key], starts[key], value, reply.mixing) for key, value in trained.items()})


@torch.no_grad()
def moved(now: Tensor, then: Tensor, trained: Tensor, mixing: float) -> Tensor:
    """now + mixing (trained - then), rounded where it counts whole numbers."""
    if now.is_floating_point():
        return now + (trained.to(now) - then.to(now)) * mixing
    # counters, which in fp32 would lose their last digits
    return now + ((trained.to(now.device) - then.to(now.device)).double() * mixing).round().to(now.dtype)
