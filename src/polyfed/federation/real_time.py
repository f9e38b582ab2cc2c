"""The clock of a deployment: replies come when they come, and it is written down when that was."""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, Queue
from typing import Any

from polyfed.federation.timeline import Exchange, Job, Timeline, done_at
from polyfed.federation.timeline_events import OPENED, TimelineEvent
from polyfed.wire.messages import Answer, Request

_TICK = 1e-6  # seconds; no two replies come at one time, so that a replay has their order


@dataclass(kw_only=True)
class RealTime(Timeline):
    """Clients at work elsewhere, each asked in a thread of its own, or the group that is summed with it.

    ``now`` is when the last reply was taken, or a round was opened since. What was at work when a run was killed is
    asked again, with what it was sent before.

    Attributes:
        send: carries a job's requests, before they are encoded, and waits for what comes of them.
    """

    send: Callable[[Sequence[Request]], Any]
    _asked: set[str] = field(default_factory=set)
    _arrived: Queue[Job | Exception] = field(default_factory=Queue)
    _results: dict[str, Any] = field(default_factory=dict)
    _coming: Job | None = None
    _last: float = 0.0
    _origin: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_real(self) -> bool:
        return True

    def opens(self, number: int) -> float:
        """Now: the server's own work since the last reply is no part of the round's time."""
        with self._lock:
            self.now = self._moment()
        self.events.append(TimelineEvent(number, "", OPENED, "", number, self.now))
        return self.now

    def ends_of(self, request: Request) -> float:
        return math.inf

    @property
    def is_due(self) -> bool:
        return False

    def next(self, limit: float = math.inf) -> Job | None:
        """Whose reply came next, once it is there; None at a time at which none is.

        Raises:
            Exception: what ``send`` raised.
        """
        for job in self.jobs():
            self._ask(job)
        while self._coming is None and self.at_work:
            patience = None if limit == math.inf else max(0.0, limit - self._clock())
            try:
                coming = self._arrived.get(timeout=patience)
                if isinstance(coming, Exception):
                    raise coming
                self._coming = coming
            except Empty:
                if self._clock() >= limit:
                    break
        return self._coming if self._coming is not None and done_at(self._coming) <= limit else None

    def take(self, job: Job) -> None:
        super().take(job)
        self._coming = None
        self._asked.discard(job[0].request.client)

    def pass_to(self, limit: float) -> None:
        super().pass_to(limit)
        with self._lock:  # what comes from now on came later
            self._last = max(self._last, limit)

    def carried(self, exchange: Exchange) -> Exchange:
        def held(requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
            return (self._results.pop(request.client) for request in requests)

        return held

    def result(self, job: Job, perform: Callable[[Sequence[Request]], Any]) -> Any:
        return self._results.pop(job[0].request.client)

    def _ask(self, job: Job) -> None:
        """Ask, unless that is done."""
        if job[0].request.client in self._asked:
            return
        self._asked.add(job[0].request.client)
        self._clock()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._wait, job), daemon=True).start()

    def _wait(self, job: Job) -> None:
        try:
            result = self.send([one.request for one in job])
        except Exception as error:  # no client's fault, which would be an answer
            self._arrived.put(error)
            return
        with self._lock:  # in the order of their times
            self._results[job[0].request.client] = result
            moment = self._moment()
            self._arrived.put(tuple(replace(one, ends=moment) for one in job))

    def _moment(self) -> float:
        """Now, later than any other moment; under the lock."""
        self._last = max(self._last + _TICK, self._clock())
        return self._last

    def _clock(self) -> float:
        """Seconds since the run began, while it was at work."""
        if self._origin is None:
            self._origin = time.monotonic() - self.now
            self._last = self.now
        return time.monotonic() - self._origin
