"""The state of a run while it goes on, from its events."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import singledispatchmethod

from polyfed.reporting.client_spread import PREFERRED
from polyfed.reporting.recalls import is_context
from polyfed.reporting.statistics import finite_mean, finite_values
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
from polyfed.runs.records import SERVER

_WINDOW = 5  # rounds that the estimate of the remaining time looks back
_KINDS = ("test", "validation", "train")
_Metric = tuple[str, str, str]  # ``server`` or ``clients``, kind, name


@dataclass
class RunState(Callback):
    """Fills itself from events; the same event twice is the same as once."""

    name: str = ""
    rounds: int = 0  # T, 0 if not known yet
    round: int = 0  # the current or last one, 0 before the first
    running: bool = False  # a round has begun and is not complete
    finished: bool = False  # the run has ended
    step: str = ""  # that the clients perform
    clients: dict[str, str] = field(default_factory=dict)  # of this step -> waiting, working, done or excluded
    work: Working | None = None  # the latest report of somebody's work; that of preparing data names nobody
    # of the latest two rounds, by participant
    metrics: dict[_Metric, dict[int, dict[str, float]]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)  # round -> wall time
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)  # round -> bytes up and down
    incidents: dict[Incident, None] = field(default_factory=dict)  # in the order in which they happened
    clock: Callable[[], float] = time.time
    _began: float = 0.0
    _work_began: float = 0.0
    _at: float | None = None

    # ---- events

    @singledispatchmethod
    def handle(self, event: Event) -> None:
        """Take in an event."""

    @handle.register
    def _(self, event: RunStarted) -> None:
        done = event.done
        self.name, self.rounds, self.round = event.name, event.rounds, done
        self.running = self.finished = False
        self.clients, self.step, self.work = {}, "", None
        # a resumed run does again what came after its last complete round
        self.seconds = {number: value for number, value in self.seconds.items() if number <= done}
        self.sent = {number: value for number, value in self.sent.items() if number <= done}
        self.incidents = {incident: None for incident in self.incidents if incident.round <= done}
        for by_round in self.metrics.values():
            for number in [number for number in by_round if number > done]:
                del by_round[number]

    @handle.register
    def _(self, event: RoundStarted) -> None:
        self.round, self.running, self.step, self.work = event.round, True, "", None
        self.clients = dict.fromkeys(event.cohort, "waiting")
        self._began = self._now()

    @handle.register
    def _(self, event: StepStarted) -> None:
        self.step, self.work = event.step, None
        excluded = {client: status for client, status in self.clients.items() if status == "excluded"}
        self.clients = dict.fromkeys(event.clients, "waiting") | excluded

    @handle.register
    def _(self, event: ClientStarted) -> None:
        self._enter(event.step)
        self.clients[event.client] = "working"
        self._report(Working(event.client, event.step))

    @handle.register
    def _(self, event: ClientDone) -> None:
        self._enter(event.step)
        self.clients[event.client] = "done"
        self.work = None

    @handle.register
    def _(self, event: Working) -> None:
        self._report(event)

    @handle.register
    def _(self, event: Preparing) -> None:
        self._report(Working("", event.what, event.done, event.total))

    @handle.register
    def _(self, event: Incident) -> None:
        self.incidents[event] = None
        if event.incident == "client_excluded" and self.running and event.round == self.round:
            self.clients[event.participant] = "excluded"

    @handle.register
    def _(self, event: Measured) -> None:
        group = SERVER if event.participant == SERVER else "clients"
        for name, value in event.metrics.items():
            if not is_context(name):
                by_round = self.metrics.setdefault((group, event.kind, name), {})
                by_round.setdefault(event.round, {})[event.participant] = value
                for number in sorted(by_round)[:-2]:
                    del by_round[number]

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
        """Seconds that are left if the remaining rounds are like the latest; None before the first is complete."""
        if not self.seconds or not self.rounds:
            return None
        a_round = finite_mean(self.seconds[number] for number in sorted(self.seconds)[-_WINDOW:])
        return max(0.0, (self.rounds - self.round + self.running) * a_round - min(self._spent, a_round))

    @property
    def bytes(self) -> tuple[int, int]:
        return sum(up for up, _ in self.sent.values()), sum(down for _, down in self.sent.values())

    @property
    def step_in_words(self) -> str:
        """How far the clients are with their step."""
        counts = Counter(self.clients.values())
        parts = [f"{counts['done']}/{len(self.clients)} clients done"] if self.clients else ["no client is asked"]
        parts += [f"{counts[status]} {status}" for status in ("working", "excluded") if counts[status]]
        return ", ".join(parts) + (f" ({self.step})" if self.step else "")

    @property
    def work_in_words(self) -> str:
        """Who is at work on what, how far and for how long; empty if nobody reports."""
        work = self.work
        if work is None:
            return ""
        far = f" {work.done:,} of {work.total:,}" if work.total else ""
        return f"{work.participant or 'preparing'}: {work.what}{far}, {max(0.0, self.clock() - self._work_began):.0f} s"

    def latest(self) -> Iterator[tuple[_Metric, float, float]]:
        """Metrics with their last values, of clients the mean, and the change since the round before, if any.

        Tests stand first, then the server, then the main metrics of tasks.
        """
        for metric in sorted(self.metrics, key=_rank):
            by_round = self.metrics[metric]
            means = [_mean(by_round[number]) for number in sorted(by_round)]
            if means:
                yield metric, means[-1], means[-1] - means[-2] if len(means) > 1 else math.nan

    @property
    def _spent(self) -> float:
        return max(0.0, self.clock() - self._began) if self.running else 0.0

    def _now(self) -> float:
        return self.clock() if self._at is None else self._at

    def _report(self, work: Working) -> None:
        if self.work is None or (self.work.participant, self.work.what) != (work.participant, work.what):
            self._work_began = self._now()
        self.work = work

    def _enter(self, step: str) -> None:
        """Begin a step that nobody announced: all who are not excluded wait."""
        if step != self.step:
            self.handle(StepStarted(step, list(self.clients)))


def incident_line(incident: Incident) -> str:
    """What happened to whom."""
    what = incident.incident.replace("_", " ")
    return f"round {incident.round}: {what}: {incident.participant}: {incident.reason}"


def _rank(metric: _Metric) -> tuple[int, bool, bool]:
    participant, kind, name = metric
    return _KINDS.index(kind) if kind in _KINDS else len(_KINDS), participant != SERVER, name not in PREFERRED


def _mean(values: dict[str, float]) -> float:
    finite = finite_values(values)
    return finite_mean(finite.values()) if finite else math.nan
