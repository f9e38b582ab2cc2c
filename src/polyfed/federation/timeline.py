"""The clients of a run in time, virtual or real: who is at work on what, whose reply comes next, and how late it is."""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from polyfed.core.untrusted import plain
from polyfed.wire.limits import Frame, Limits, ReplySize
from polyfed.wire.messages import Answer, Envelope, Request, envelope_requests, request_of
from polyfed.wire.payload import Payload, TensorBundle

Exchange = Callable[[Sequence[Request], float | None], Iterator[Answer]]
_OWN = Limits(message_bytes=1 << 50, text_bytes=1 << 30, tensors=1 << 30)
"""On what is read of a checkpoint: what the server sent itself."""
STARTED, REPLIED, DROPPED, LOST = "started", "replied", "dropped", "lost"
"""A client was asked; its reply counts; its reply is too old; it did not reply, or what it did was refused."""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """What became, in a round, of what a client was asked in this or an earlier one: a line of ``pace.jsonl``.

    Attributes:
        round: number of the server step.
        client: its id.
        event: one of those above.
        step: that it was asked to perform.
        asked: round in which it was asked.
        seconds: since the run began.
        error: why it did not reply, where it did not.
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
        request: what it was asked, with what it was sent before that was encoded.
        ends: when its reply comes; in real time nobody knows before it does.
    """

    request: Request
    ends: float


@dataclass
class Timeline:
    """The clients of a run in virtual time.

    Attributes:
        times: client -> seconds that a step takes it, in client order.
        now: seconds since the run began.
        at_work: client -> what it is doing; lasts from round to round.
        events: lines of ``pace.jsonl`` that are not written yet.
    """

    times: Mapping[str, float]
    now: float = 0.0
    at_work: dict[str, AtWork] = field(default_factory=dict)
    events: list[TimelineEvent] = field(default_factory=list)

    @property
    def is_real(self) -> bool:
        """Whether clients have a real clock: what they do takes them, used or not."""
        return False

    def wait_for(self, requests: Iterable[Request]) -> Iterator[AtWork]:
        """Start clients, and go on until the last has replied; who did what until when."""
        for request in requests:
            self.start(request)
        while (coming := self.next()) is not None:
            yield coming

    def start(self, request: Request) -> None:
        """A client begins."""
        self.at_work[request.client] = AtWork(request, self.now + self.times[request.client])
        self.note(STARTED, request, request.round, self.now)

    @property
    def is_due(self) -> bool:
        """Whether somebody replies at this very time."""
        return any(one.ends == self.now for one in self.at_work.values())

    def next(self) -> AtWork | None:
        """Go on to the next reply, of several at one time that of the first in client order; None: nobody works."""
        in_order = [self.at_work[client] for client in self.times if client in self.at_work]
        return self._taken(min(in_order, key=lambda one: one.ends)) if in_order else None

    def _taken(self, one: AtWork) -> AtWork:
        del self.at_work[one.request.client]
        self.now = max(self.now, one.ends)
        return one

    def carried(self, exchange: Exchange) -> Exchange:
        """How requests whose replies are due are carried; see ``Channel.exchange``."""
        return exchange

    def note(self, event: str, request: Request, round_number: int, seconds: float, error: str | None = None) -> None:
        """Write down what became of a request in a round."""
        words = None if error is None else plain(error)
        about = round_number, request.client, event, request.step, request.round, seconds, words
        self.events.append(TimelineEvent(*about))

    def taken(self) -> list[dict[str, Any]]:
        """Lines of the events, which are forgotten."""
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
        """Be as when these facts and tensors were taken."""
        raws = {name: value.view(torch.uint8).numpy().data for name, value in tensors.items()}
        frames = [
            Frame(header, [raws[f"{k}/{i}"] for i in range(count)]) for k, (header, count) in enumerate(facts["frames"])
        ]
        self.now, self.at_work, self.events = facts["now"], {}, []
        for text, places, ends, *size in facts["at_work"]:
            request = request_of(text, [frames[place] for place in places], _OWN)
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

    ``now`` is when the last client was asked or its reply taken. What was at work when a run was killed is asked again,
    with what it was sent before.

    Attributes:
        send: carries a request, before it is encoded, and waits for the answer.
    """

    send: Callable[[Request], Answer]
    _asked: set[str] = field(default_factory=set)
    _arrived: Queue[tuple[AtWork, Answer | Exception]] = field(default_factory=Queue)
    _answers: dict[str, Answer] = field(default_factory=dict)
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
        """Wait for the reply that comes next.

        Raises:
            Exception: what ``send`` raised, which is no client's fault.
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
        """Those that have arrived are held; nothing is carried a second time."""
        return lambda requests, deadline: (self._answers.pop(request.client) for request in requests)

    def _wait(self, one: AtWork) -> None:
        try:
            answer: Answer | Exception = self.send(one.request)
        except Exception as error:
            answer = error
        self._arrived.put((AtWork(one.request, self._clock()), answer))

    def _clock(self) -> float:
        """Seconds since the run began, while it was at work."""
        return time.monotonic() - self._origin

    def restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().restore(facts, tensors)
        self._origin = time.monotonic() - self.now
