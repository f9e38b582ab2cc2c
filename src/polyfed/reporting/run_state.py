"""What is known of a run while it goes on: gathered from progress, from records on disk, or from both."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from polyfed.reporting.progress import WINDOW, Metrics, Progress
from polyfed.reporting.recalls import is_context
from polyfed.reporting.records import SERVER, RunRecords

if TYPE_CHECKING:
    from rich.console import RenderableType

Status = Literal["waiting", "working", "done", "excluded"]
CLIENTS = "clients"
_NUMBER = re.compile(r"-\d+$")


@dataclass
class ClientState:
    """What a client does in the current step of a round.

    Attributes:
        status: ``waiting`` to be asked or to begin.
        step: the step that it works on or has done.
        since: when it began to work, seconds since 1970.
        seconds: what the step took it.
        reason: why it is excluded.
    """

    status: Status = "waiting"
    step: str = ""
    since: float = 0.0
    seconds: float = 0.0
    reason: str = ""


class Curve:
    """One metric by round: the server's, or the mean over the clients that were measured in a round."""

    def __init__(self) -> None:
        self._settled: dict[int, float] = {}
        self._round = 0
        self._values: dict[str, float] = {}

    def add(self, round_number: int, party: str, value: float) -> None:
        """Enter a party's value; a second one of a round replaces the first."""
        if round_number != self._round:
            self._settled, self._round, self._values = self.by_round(), round_number, {}
        self._values[party] = value

    def cut(self, done: int) -> None:
        """Forget what came after round ``done``."""
        self._settled = {number: value for number, value in self.by_round().items() if number <= done}
        self._round, self._values = 0, {}

    def by_round(self) -> dict[int, float]:
        """Round -> mean over the finite values, NaN if there is none; rounds ascending."""
        finite = [value for value in self._values.values() if math.isfinite(value)]
        current = {self._round: fmean(finite) if finite else math.nan} if self._values else {}
        return dict(sorted((self._settled | current).items()))


@dataclass
class RunState(Progress):
    """Fills itself from what it is told; being told twice is the same as once.

    Attributes:
        name: name of the run.
        rounds: T, 0 if not known yet.
        total_clients: clients in the federation.
        round: the current or last round, 0 before the first.
        running: whether a round has begun and is not complete.
        finished: whether the run has ended.
        step: the step that the clients perform.
        clients: client id -> its state in this step, in the order of the cohort.
        curves: (``server`` or ``clients``, kind, metric) -> its course.
        seconds: round -> wall time.
        sent: round -> bytes up and down.
        events: round, party, event and reason, in the order in which they happened.
        clock: gives the time, in seconds since 1970.
    """

    name: str = ""
    rounds: int = 0
    total_clients: int = 0
    round: int = 0
    running: bool = False
    finished: bool = False
    step: str = ""
    clients: dict[str, ClientState] = field(default_factory=dict)
    curves: dict[tuple[str, str, str], Curve] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    events: dict[tuple[int, str, str, str], None] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    _began: float = 0.0
    _at: float | None = None

    @classmethod
    def of(cls, records: RunRecords) -> RunState:
        """What a run folder tells; its rounds count as complete."""
        state = cls(name=records.name, round=max(records.seconds, default=0), total_clients=len(records.clients))
        state.rounds = int(records.config.get("run", {}).get("rounds", 0))
        for record in records.measurements:
            state.evaluated(record.round, record.party, record.kind, record.metrics)
        for event in records.events:
            state.event(event.round, event.party, event.event, event.reason)
        up, down = records.bytes_per_round("up"), records.bytes_per_round("down")
        state.sent = {number: (up[number], down[number]) for number in up}
        state.seconds = dict(records.seconds)
        return state

    # ---- what is told

    def run_started(self, name: str, rounds: int, clients: int, *, done: int = 0) -> None:
        """Forget what came after round ``done``: it is done again."""
        self.name, self.rounds, self.total_clients, self.round = name, rounds, clients, done
        self.running = self.finished = False
        self.clients, self.step = {}, ""
        self.seconds = {number: value for number, value in self.seconds.items() if number <= done}
        self.sent = {number: value for number, value in self.sent.items() if number <= done}
        self.events = {event: None for event in self.events if event[0] <= done}
        for curve in self.curves.values():
            curve.cut(done)

    def round_started(self, round_number: int, cohort: Sequence[str]) -> None:
        """All of the cohort wait."""
        self.round, self.running, self.step = round_number, True, ""
        self.clients = {client: ClientState() for client in cohort}
        self._began = self._now()

    def step_started(self, step: str, clients: Sequence[str]) -> None:
        """Those asked wait; the excluded stay, others are not part of this step."""
        self.step = step
        out = {client: state for client, state in self.clients.items() if state.status == "excluded"}
        self.clients = {client: ClientState() for client in clients if client not in out} | out

    def client_started(self, client: str, step: str) -> None:
        """It works."""
        self._enter(step)
        self.clients[client] = ClientState("working", step, since=self._now())

    def client_done(self, client: str, step: str, seconds: float) -> None:
        """It has answered."""
        self._enter(step)
        self.clients[client] = ClientState("done", step, seconds=seconds)

    def event(self, round_number: int, party: str, event: str, reason: str) -> None:
        """Remember it; who is excluded is so until the next round."""
        self.events[round_number, party, event, reason] = None
        if event == "client_excluded" and self.running and round_number == self.round:
            self.clients[party] = ClientState("excluded", self.step, reason=reason)

    def evaluated(self, round_number: int, party: str, kind: str, metrics: Metrics) -> None:
        """Extend the curves."""
        group = SERVER if party == SERVER else CLIENTS
        for name, value in metrics.items():
            if not is_context(name):
                self.curves.setdefault((group, kind, name), Curve()).add(round_number, party, value)

    def traffic(self, round_number: int, up: int, down: int) -> None:
        """Remember it."""
        self.sent[round_number] = (up, down)

    def round_finished(self, round_number: int, seconds: float) -> None:
        """Its time counts."""
        self.round, self.running = round_number, False
        self.seconds[round_number] = seconds

    def run_finished(self, summary: RenderableType) -> None:
        """The end."""
        self.running, self.finished = False, True

    def happened_at(self, when: float) -> None:
        """Times of what is told next count from then."""
        self._at = when

    # ---- what follows from it

    @property
    def elapsed(self) -> float:
        """Seconds of all complete rounds and of the one that goes on; pauses between processes do not count."""
        return sum(self.seconds.values()) + self._spent

    @property
    def left(self) -> float | None:
        """Seconds that the remaining rounds will take if they are like the latest; None if nothing tells."""
        if not self.seconds or not self.rounds:
            return None
        remaining = self.rounds - max(self.seconds)
        latest = [self.seconds[number] for number in sorted(self.seconds)[-WINDOW:]]
        return max(0.0, remaining * fmean(latest) - self._spent)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes up and down of all rounds."""
        return sum(up for up, _ in self.sent.values()), sum(down for _, down in self.sent.values())

    def working_for(self, client: ClientState) -> float:
        """Seconds since it began."""
        return max(0.0, self.clock() - client.since)

    def groups(self) -> Mapping[str, dict[str, ClientState]]:
        """Group -> its clients of this step; the group of ``image-07`` is ``image``, that of ``image`` as well."""
        found: dict[str, dict[str, ClientState]] = {}
        for client, state in self.clients.items():
            found.setdefault(_NUMBER.sub("", client), {})[client] = state
        return found

    @property
    def _spent(self) -> float:
        return max(0.0, self.clock() - self._began) if self.running else 0.0

    def _now(self) -> float:
        return self.clock() if self._at is None else self._at

    def _enter(self, step: str) -> None:
        """A step that nobody announced: all who are not excluded wait."""
        if step != self.step:
            self.step_started(step, list(self.clients))
