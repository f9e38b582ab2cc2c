"""Virtual time: who is at work on what, whose reply comes next, and how late it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyfed.core.untrusted import plain
from polyfed.federation.timeline_events import STARTED, TimelineEvent
from polyfed.federation.times import ClientTimes
from polyfed.wire.frames import Frame
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer, Envelope, Request, envelope_requests, request_of

Job = tuple["AtWork", ...]
"""Clients whose replies come at once: one alone, or a group whose replies are summed."""
Exchange = Callable[[Sequence[Request], float | None], Iterator[Answer]]
_OWN = Limits(message_bytes=1 << 50, text_bytes=1 << 30, tensors=1 << 30)
"""On what is read of a checkpoint: what the server sent itself."""


@dataclass(frozen=True)
class AtWork:
    """A client at work.

    Attributes:
        request: what it was asked, with what it was sent before that was encoded.
        asked, ends: when it was asked, and when its reply comes.
    """

    request: Request
    asked: float
    ends: float


def done_at(job: Job) -> float:
    return max(one.ends for one in job)


@dataclass
class Timeline:
    """The clients of a run in time.

    Attributes:
        times: client -> how long it takes, in client order.
        now: seconds since the run began.
        at_work: client -> what it is doing; lasts from round to round.
        events: lines of ``pace.jsonl`` that are not written yet.
        groups: clients whose replies come at once; none: each alone.
    """

    times: Mapping[str, ClientTimes]
    now: float = 0.0
    at_work: dict[str, AtWork] = field(default_factory=dict)
    events: list[TimelineEvent] = field(default_factory=list)
    groups: Sequence[Sequence[str]] = ()

    @property
    def is_real(self) -> bool:
        """Whether clients have a real clock, or had when this was recorded: what they do takes them, used or not."""
        return False

    def opens(self, number: int) -> float:
        """The time at which a round begins to wait for replies."""
        return self.now

    def ends_of(self, request: Request) -> float:
        """When a client that is asked now replies."""
        times = self.times[request.client]
        return times.begins(self.now) + times.seconds

    def wait_for(self, requests: Iterable[Request]) -> Iterator[AtWork]:
        """All of them are at work, and time goes on until the last has replied; who did what until when."""
        for request in requests:
            self.start(request)
        while (coming := self.next()) is not None:
            self.take(coming)
            yield from coming

    def start(self, request: Request) -> None:
        """A client begins, or will as soon as it is awake."""
        self.at_work[request.client] = AtWork(request, self.now, self.ends_of(request))
        self.note(STARTED, request, request.round, self.now)

    @property
    def is_due(self) -> bool:
        """Whether somebody replies at this very time, and not before a real round was opened."""
        coming = self.next(self.now)
        return coming is not None and done_at(coming) == self.now

    def jobs(self) -> list[Job]:
        """Who is at work, in client order; a group once its last client has replied."""
        groups = self.groups or [(client,) for client in self.times]
        return [tuple(self.at_work[client] for client in group) for group in groups if group[0] in self.at_work]

    def next(self, limit: float = math.inf) -> Job | None:
        """Who replies next, up to a time; of several at one time the first in client order."""
        return min((job for job in self.jobs() if done_at(job) <= limit), key=done_at, default=None)

    def take(self, job: Job) -> None:
        """Go on to when it is done."""
        for one in job:
            del self.at_work[one.request.client]
        self.now = max(self.now, done_at(job))

    def pass_to(self, limit: float) -> None:
        """Go on to a time at which nobody replies."""
        self.now = max(self.now, limit)

    def result(self, job: Job, perform: Callable[[Sequence[Request]], Any]) -> Any:
        """What comes of a group's requests that are due, as ``perform`` makes it, or made it where time is real."""
        return perform([one.request for one in job])

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
            "at_work": [[envelope.text, envelope.places, one.asked, one.ends] for envelope, one in lines],
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
        for text, places, asked, ends in facts["at_work"]:
            request = request_of(text, [frames[place] for place in places], _OWN)
            self.at_work[request.client] = AtWork(request, asked, ends)

    def _packed(self) -> tuple[list[Envelope], list[Frame]]:
        return envelope_requests([one.request for one in self.at_work.values()])
