"""Rounds that end before all clients have replied: clients in virtual or real time, and the weight of late replies."""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from polyfed.core.randomness import generator
from polyfed.core.untrusted import plain
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort
from polyfed.federation.filters import Ask, Reply
from polyfed.federation.paces import Buffered
from polyfed.wire.limits import Frame, Limits, ReplySize
from polyfed.wire.messages import Answer, Envelope, Request, StateVersion, envelope_requests, request_of
from polyfed.wire.payload import Payload, TensorBundle, Weights

Exchange = Callable[[Sequence[Request], float | None], Iterator[Answer]]
_OWN = Limits(message_bytes=1 << 50, text_bytes=1 << 30, tensors=1 << 30)
"""Limits of requests that are read from a checkpoint, which the server sent itself."""
STARTED, REPLIED, DROPPED, LOST = "started", "replied", "dropped", "lost"
"""A client was asked; its reply counts; its reply is too old; it did not reply, or what it did was refused."""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Outcome, in a round, of a request of this or an earlier one: a line of ``pace.jsonl``.

    Attributes:
        round: number of the server step.
        client: id of the client.
        event: one of the outcomes above.
        step: name of the requested step.
        asked: round of the request.
        seconds: since the run began.
        error: reason of a missing reply.
    """

    round: int
    client: str
    event: str
    step: str
    asked: int
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class AtWork:
    """A client at work.

    Attributes:
        request: request with its payload before encoding.
        ends: time of its reply; in real time unknown until it arrives.
    """

    request: Request
    ends: float


@dataclass
class Timeline:
    """The clients of a run in virtual time.

    Attributes:
        times: client -> seconds that a step takes it, in client order.
        now: seconds since the run began.
        at_work: client -> its request at work; lasts across rounds.
        events: lines of ``pace.jsonl`` that are not written yet.
    """

    times: Mapping[str, float]
    now: float = 0.0
    at_work: dict[str, AtWork] = field(default_factory=dict)
    events: list[TimelineEvent] = field(default_factory=list)

    @property
    def is_real(self) -> bool:
        """True if clients have a real clock: steps take time, whether used or not."""
        return False

    def wait_for(self, requests: Iterable[Request]) -> Iterator[AtWork]:
        """Start clients and advance until the last has replied; requests in order of their replies."""
        for request in requests:
            self.start(request)
        while (coming := self.next()) is not None:
            yield coming

    def start(self, request: Request) -> None:
        """Start a client."""
        self.at_work[request.client] = AtWork(request, self.now + self.times[request.client])
        self.note(STARTED, request, request.round, self.now)

    @property
    def is_due(self) -> bool:
        """True if a client replies at this very time."""
        return any(one.ends == self.now for one in self.at_work.values())

    def next(self) -> AtWork | None:
        """Advance to the next reply, of several at one time the first in client order; None: no client is at work."""
        in_order = [self.at_work[client] for client in self.times if client in self.at_work]
        return self._taken(min(in_order, key=lambda one: one.ends)) if in_order else None

    def _taken(self, one: AtWork) -> AtWork:
        del self.at_work[one.request.client]
        self.now = max(self.now, one.ends)
        return one

    def carried(self, exchange: Exchange) -> Exchange:
        """Exchange for requests whose replies are due; see ``Channel.exchange``."""
        return exchange

    def note(self, event: str, request: Request, round_number: int, seconds: float, error: str | None = None) -> None:
        """Note the outcome of a request in a round."""
        words = None if error is None else plain(error)
        about = round_number, request.client, event, request.step, request.round, seconds, words
        self.events.append(TimelineEvent(*about))

    def taken(self) -> list[dict[str, Any]]:
        """Lines of the events so far, which are dropped."""
        events, self.events = self.events, []
        return [{name: value for name, value in asdict(event).items() if value is not None} for event in events]

    # ---- what a checkpoint keeps

    def facts(self) -> dict[str, Any]:
        """All but tensors, as JSON values."""
        envelopes, frames = self._packed()
        lines = zip(envelopes, self.at_work.values(), strict=True)
        return {
            "now": self.now,
            "frames": [[frame.header, len(frame.buffers)] for frame in frames],
            "at_work": [[envelope.text, envelope.places, one.ends, one.request.reply_size] for envelope, one in lines],
        }

    def tensors(self) -> dict[str, Tensor]:
        """The bytes of what clients at work were sent, each tensor once."""
        return {
            f"{k}/{i}": torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw.nbytes else torch.empty(0)
            for k, frame in enumerate(self._packed()[1])
            for i, raw in enumerate(frame.buffers)
        }

    def restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore the state of these facts and tensors."""
        raws = {name: value.view(torch.uint8).numpy().data for name, value in tensors.items()}
        frames = [Frame(header, [raws[f"{k}/{i}"] for i in range(n)]) for k, (header, n) in enumerate(facts["frames"])]
        self.now, self.at_work, self.events = facts["now"], {}, []
        for text, positions, ends, *size in facts["at_work"]:
            request = request_of(text, [frames[position] for position in positions], _OWN)
            most = ReplySize(*size[0]) if size and size[0] else None  # runs of 0.4.0 have written none
            self.at_work[request.client] = AtWork(replace(request, reply_size=most), ends)

    def _packed(self) -> tuple[list[Envelope], list[Frame]]:
        """The requests by their content alone: a resumed run holds other objects, its tensors in another order."""
        known: dict[bytes, TensorBundle] = {}

        def equal(bundle: TensorBundle) -> TensorBundle:
            if bundle.digest not in known:
                known[bundle.digest] = replace(bundle, tensors=dict(sorted(bundle.items())))
            return known[bundle.digest]

        def laid_out(request: Request) -> Request:
            bundles = {name: equal(bundle) for name, bundle in request.payload.bundles.items()}
            return replace(request, payload=Payload({**request.payload.fields, **bundles}))

        return envelope_requests([laid_out(one.request) for one in self.at_work.values()])


@dataclass(kw_only=True)
class RealTime(Timeline):
    """Clients at work elsewhere, each asked in a thread of its own.

    ``now`` is the time of the last request or reply. Requests at work when a run was killed are sent again, with the
    payload of before.

    Attributes:
        send: carries a request, before it is encoded, and waits for the answer.
    """

    send: Callable[[Request], Answer]
    _asked: set[str] = field(default_factory=set)
    _arrived: Queue[tuple[AtWork, Answer | Exception]] = field(default_factory=Queue)
    _answers: dict[str, Answer] = field(default_factory=dict)
    _arrival: threading.Lock = field(default_factory=threading.Lock)
    _origin: float = field(default_factory=time.monotonic)

    @property
    def is_real(self) -> bool:
        return True

    def start(self, request: Request) -> None:
        self.now = self._clock()
        self.at_work[request.client] = AtWork(request, math.inf)
        self.note(STARTED, request, request.round, self.now)

    @property
    def is_due(self) -> bool:
        return False

    def next(self) -> AtWork | None:
        """Wait for the next reply.

        Raises:
            Exception: any error of ``send``, which is not a failure of a client.
        """
        for one in self.at_work.values():
            if one.request.client not in self._asked:
                self._asked.add(one.request.client)
                context = contextvars.copy_context()
                threading.Thread(target=context.run, args=(self._wait, one), daemon=True).start()
        if not self.at_work:
            return None
        coming, answer = self._arrived.get()
        if isinstance(answer, Exception):
            raise answer
        self._answers[coming.request.client] = answer
        self._asked.discard(coming.request.client)
        return self._taken(coming)

    def carried(self, exchange: Exchange) -> Exchange:
        """Exchange that returns answers that have arrived; it sends nothing again."""
        return lambda requests, deadline: (self._answers.pop(request.client) for request in requests)

    def _wait(self, one: AtWork) -> None:
        try:
            answer: Answer | Exception = self.send(one.request)
        except Exception as error:
            answer = error
        with self._arrival:  # so that replies stand in the order of their times
            self._arrived.put((AtWork(one.request, self._clock()), answer))

    def _clock(self) -> float:
        """Seconds since the run began, while it was at work."""
        return time.monotonic() - self._origin

    def restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().restore(facts, tensors)
        self._origin = time.monotonic() - self.now


# torch's own names, and running means of classes
_STATISTICS = ("running_mean", "running_var", "running_sums", "running_mass")


@dataclass(kw_only=True)
class PacedCohort(Cohort):
    """The clients that may be started in a round, and those at work since earlier ones.

    ``ask`` starts idle clients with the server's present state and yields the replies that arrive next, late ones
    rebased by ``LateReplies``. A step depends on its request alone, so that in virtual time it is performed when its
    reply is due.

    Attributes:
        pace: rule by which the round ends.
        timeline: timeline of the run.
        everybody: all clients of the federation, in client order.
        seed: seed of the run, for the order of starts where not all clients may be at work.
        replied: clients whose replies were accepted in this round, in that order.
    """

    pace: Buffered
    timeline: Timeline
    everybody: tuple[ClientInfo, ...]
    seed: int
    replied: list[ClientInfo] = field(default_factory=list)

    def replies(self, ask: Ask, phase: int) -> Iterator[Reply]:
        """Start idle clients; replies until the round is full, or no client is at work."""
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
        """Start idle clients, each once per round, as many as may be at work."""
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
    def versions(self) -> dict[str, StateVersion]:
        """Maps clients whose replies have arrived in this round to the versions of their states."""
        return {}

    @cached_property
    def _order(self) -> list[str]:
        """Clients that may be started in this round, in the order in which they start."""
        names = [client.id for client in self.clients]
        if self.pace.concurrency is None:
            return names
        order = torch.randperm(len(names), generator=generator(self.seed, self.round, "started"))
        return [names[position] for position in order.tolist()]

    def _due(self, ask: Ask, phase: int) -> list[AtWork]:
        """Clients whose replies complete the round, in order of arrival, excluding stale ones."""
        due: list[AtWork] = []
        while len(self.replied) + len(due) < self.pace.most(self.everybody):
            if not self.timeline.is_due:  # no client is started between two replies that arrive at one time
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
    """Rebases each late reply on the present global model; see ``Buffered``.

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
    """now + mixing (trained - then), rounded for counters."""
    if now.is_floating_point():
        return now + (trained.to(now) - then.to(now)) * mixing
    # counters, which in fp32 would lose their last digits
    return now + ((trained.to(now.device) - then.to(now.device)).double() * mixing).round().to(now.dtype)
