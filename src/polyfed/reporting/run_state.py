"""The state of a run while it goes on, from its events, from records on disk, or from both."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from typing import Literal

from polyfed.reporting.recalls import is_context
from polyfed.reporting.statistics import finite_mean
from polyfed.reporting.tables import duration
from polyfed.runs.events import (
    Callback,
    ClientDone,
    ClientStarted,
    Event,
    Incident,
    Measured,
    Preparing,
    RoundComplete,
    RoundStarted,
    RunComplete,
    RunStarted,
    StepStarted,
    Working,
)
from polyfed.runs.records import SERVER, RunRecords

Status = Literal["waiting", "working", "done", "excluded"]
PREPARING = "preparing"
_WINDOW = 5  # rounds that the estimate of the remaining time looks back
_MOST_NAMES = 2
# purposes of random streams, which methods name; others are shown as they are
_WORDS = {
    "task": "training",
    "distil": "distilling",
    "contrast": "contrasting",
    "align": "aligning",
    "digest": "digesting",
    "study": "studying",
    "first-public": "training on public data",
    "first-private": "training",
}


@dataclass
class ClientProgress:
    """What a client does in the current step of a round."""

    status: Status = "waiting"  # to be asked or to begin
    step: str = ""  # that it works on or has done
    since: float = 0.0  # when it began to work, seconds since 1970
    seconds: float = 0.0  # what the step took it
    reason: str = ""  # why it is excluded
    share: float = 0.0  # of the step that it has done, as far as it reports, 0 to 1


@dataclass(frozen=True)
class Activity:
    """Who is at work on what, as one line of a display."""

    who: str  # a participant, several together, or ``preparing``
    words: str  # what it does and since when
    count: str = ""  # parts done of parts there are, where they are known
    share: float | None = None  # of it that is done, None where nobody knows

    def __str__(self) -> str:
        return "  ".join(filter(None, [self.who, self.count, self.words]))


class MetricCurve:
    """One metric by round: the server's, or the mean over the clients that were measured in a round."""

    def __init__(self) -> None:
        # clients' values are kept for the latest round alone: a thousand clients and rounds would fill the memory
        self._means: dict[int, float] = {}
        self._round = 0
        self._values: dict[str, float] = {}

    def add(self, round_number: int, participant: str, value: float) -> None:
        """Enter a participant's value; a second one of a round replaces the first."""
        if round_number != self._round:
            self._means, self._round, self._values = self.by_round(), round_number, {}
        self._values[participant] = value

    def cut(self, done: int) -> None:
        """Forget what came after round ``done``."""
        self._means = {number: value for number, value in self.by_round().items() if number <= done}
        self._round, self._values = 0, {}

    def by_round(self) -> dict[int, float]:
        """Round -> mean over the finite values, NaN if there is none; rounds ascending."""
        finite = [value for value in self._values.values() if math.isfinite(value)]
        latest = {self._round: finite_mean(finite) if finite else math.nan} if self._values else {}
        return dict(sorted((self._means | latest).items()))


@dataclass
class RunState(Callback):
    """Fills itself from events; the same event twice is the same as once."""

    name: str = ""
    rounds: int = 0  # T, 0 if not known yet
    total_clients: int = 0  # in the federation
    round: int = 0  # the current or last one, 0 before the first
    running: bool = False  # a round has begun and is not complete
    finished: bool = False  # the run has ended
    step: str = ""  # that the clients perform
    clients: dict[str, ClientProgress] = field(default_factory=dict)  # in this step, in the order of the cohort
    work: Working | None = None  # the latest report of somebody's work; that of preparing data names nobody
    # (``server`` or ``clients``, kind, metric) -> its course
    curves: dict[tuple[str, str, str], MetricCurve] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)  # round -> wall time
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)  # round -> bytes up and down
    # round, participant, event and reason, in the order in which they happened
    events: dict[tuple[int, str, str, str], None] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    _began: float = 0.0
    _work_began: float = 0.0
    _steps_done: int = 0
    _expected: float | None = None  # seconds of the current round, by its steps so far
    _at: float | None = None

    @classmethod
    def of(cls, records: RunRecords) -> RunState:
        """What a run folder tells; its rounds count as complete."""
        state = cls(name=records.name, round=max(records.seconds, default=0), total_clients=len(records.clients))
        state.rounds = records.number("rounds") or 0
        for event in (*records.measurements, *records.events):
            state.handle(event)
        up, down = records.bytes_per_round("up"), records.bytes_per_round("down")
        state.sent = {number: (up[number], down[number]) for number in up}
        state.seconds = dict(records.seconds)
        return state

    # ---- events

    @singledispatchmethod
    def handle(self, event: Event) -> None:
        """Take in an event."""

    @handle.register
    def _(self, event: Preparing) -> None:
        self._report(Working("", event.what, event.done, event.total))

    @handle.register
    def _(self, event: RunStarted) -> None:
        done = event.done
        self.name, self.rounds, self.total_clients, self.round = event.name, event.rounds, event.clients, done
        self.running = self.finished = False
        self.clients, self.step, self.work, self._expected = {}, "", None, None
        # a resumed run does again what came after its last complete round
        self.seconds = {number: value for number, value in self.seconds.items() if number <= done}
        self.sent = {number: value for number, value in self.sent.items() if number <= done}
        self.events = {incident: None for incident in self.events if incident[0] <= done}
        for curve in self.curves.values():
            curve.cut(done)
        self.curves = {key: curve for key, curve in self.curves.items() if curve.by_round()}

    @handle.register
    def _(self, event: RoundStarted) -> None:
        self.round, self.running, self.step, self.work = event.round, True, "", None
        self.clients = {client: ClientProgress() for client in event.cohort}
        self._began, self._steps_done, self._expected = self._now(), 0, None

    @handle.register
    def _(self, event: StepStarted) -> None:
        self._steps_done += bool(self.step)
        self.step, self.work = event.step, None
        excluded = {client: progress for client, progress in self.clients.items() if progress.status == "excluded"}
        self.clients = {client: ClientProgress() for client in event.clients if client not in excluded} | excluded

    @handle.register
    def _(self, event: ClientStarted) -> None:
        self._enter(event.step)
        self.clients[event.client] = ClientProgress("working", event.step, since=self._now())
        self.work, self._work_began = Working(event.client, event.step), self._now()

    @handle.register
    def _(self, event: Working) -> None:
        self._report(event)
        client = self.clients.get(event.participant)
        if client is not None and client.status == "working":
            self.clients[event.participant] = replace(client, share=_share(event))
            self._expect()

    @handle.register
    def _(self, event: ClientDone) -> None:
        self._enter(event.step)
        self.clients[event.client] = ClientProgress("done", event.step, seconds=event.seconds)
        answered = all(client.status in ("done", "excluded") for client in self.clients.values())
        self.work, self._work_began = (Working(SERVER, "") if answered else None), self._now()
        self._expect()

    @handle.register
    def _(self, event: Incident) -> None:
        self.events[event.round, event.participant, event.incident, event.reason] = None
        if event.incident == "client_excluded" and self.running and event.round == self.round:
            self.clients[event.participant] = ClientProgress("excluded", self.step, reason=event.reason)

    @handle.register
    def _(self, event: Measured) -> None:
        group = SERVER if event.participant == SERVER else "clients"
        for name, value in event.metrics.items():
            if not is_context(name):
                curve = self.curves.setdefault((group, event.kind, name), MetricCurve())
                curve.add(event.round, event.participant, value)

    @handle.register
    def _(self, event: RoundComplete) -> None:
        if event.seconds is not None:  # the state before training, round 0, has no time
            self.round, self.running, self.work = event.round, False, None
            self.seconds[event.round] = event.seconds
            self.sent[event.round] = (event.up, event.down)

    @handle.register
    def _(self, event: RunComplete) -> None:
        self.running, self.finished, self.work = False, True, None

    def happened_at(self, when: float) -> None:
        self._at = when

    # ---- what follows from it

    @property
    def elapsed(self) -> float:
        """Seconds of all complete rounds and of the one that goes on; pauses between processes do not count."""
        return sum(self.seconds.values()) + self._spent

    @property
    def left(self) -> float | None:
        """Seconds that are left if the remaining rounds are like the latest; None if nothing tells.

        Until the first round is complete, its steps so far tell how long it lasts.
        """
        a_round = self._seconds_a_round
        if a_round is None or not self.rounds:
            return None
        later = self.rounds - self.rounds_done - self.running
        return max(0, later) * a_round + (max(0.0, a_round - self._spent) if self.running else 0.0)

    @property
    def share(self) -> float:
        """How much of the run is done, 0 to 1, the round that goes on by its time."""
        if not self.rounds:
            return 0.0
        a_round = self._seconds_a_round
        current = min(0.99, self._spent / a_round) if self.running and a_round else 0.0
        return min(1.0, (self.rounds_done + current) / self.rounds)

    @property
    def rounds_done(self) -> int:
        return self.round - self.running

    @property
    def step_share(self) -> float:
        shares = {"done": 1.0, "excluded": 1.0}
        return sum(shares.get(client.status, client.share) for client in self.clients.values())

    @property
    def bytes(self) -> tuple[int, int]:
        return sum(up for up, _ in self.sent.values()), sum(down for _, down in self.sent.values())

    @property
    def activity(self) -> Activity | None:
        """What goes on at the moment, or None if nobody reports."""
        at_work = {client: progress for client, progress in self.clients.items() if progress.status == "working"}
        if len(at_work) > 1:
            names = ", ".join(list(at_work)[:_MOST_NAMES])
            more = f" and {len(at_work) - _MOST_NAMES} more" if len(at_work) > _MOST_NAMES else ""
            longest = max(map(self.working_for, at_work.values()))
            return Activity(f"{len(at_work)} clients", f"{ticking(longest)}  {self.step}: {names}{more}")
        work = self.work
        if work is None:
            return None
        words = _WORDS.get(work.what, work.what) or "at work"
        since = ticking(max(0.0, self.clock() - self._work_began))
        who = work.participant or next(iter(at_work), PREPARING)  # what a client at work needs is read for it
        if not work.total:
            return Activity(who, f"{since}  {words}")
        return Activity(who, f"{since}  {words}", f"{work.done:,}/{work.total:,}", _share(work))

    def working_for(self, client: ClientProgress) -> float:
        return max(0.0, self.clock() - client.since)

    def groups(self) -> Mapping[str, dict[str, ClientProgress]]:
        """Group -> its clients of this step; the group of ``image-07`` is ``image``, that of ``image`` as well."""
        groups: dict[str, dict[str, ClientProgress]] = {}
        for client, progress in self.clients.items():
            groups.setdefault(re.sub(r"-\d+$", "", client), {})[client] = progress
        return groups

    @property
    def _seconds_a_round(self) -> float | None:
        if self.seconds:
            return finite_mean(self.seconds[number] for number in sorted(self.seconds)[-_WINDOW:])
        return None if self._expected is None else max(self._expected, self._spent)  # the server's work comes on top

    @property
    def _spent(self) -> float:
        return max(0.0, self.clock() - self._began) if self.running else 0.0

    def _now(self) -> float:
        return self.clock() if self._at is None else self._at

    def _expect(self) -> None:
        share = (self._steps_done + self.step_share / max(1, len(self.clients))) / (self._steps_done + 1)
        if self.running and share > 0:
            self._expected = max(0.0, self._now() - self._began) / share

    def _report(self, work: Working) -> None:
        if self.work is None or (self.work.participant, self.work.what) != (work.participant, work.what):
            self._work_began = self._now()
        self.work = work

    def _enter(self, step: str) -> None:
        """Begin a step that nobody announced: all who are not excluded wait."""
        if step != self.step:
            self.handle(StepStarted(step, list(self.clients)))


def ticking(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 59.5 else duration(seconds)


def _share(work: Working) -> float:
    return min(1.0, work.done / work.total) if work.total else 0.0
