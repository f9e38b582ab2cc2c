"""What happens in a run, as one stream of typed events, and the callbacks that follow it.

Every follower of a run is a ``Callback``: what is shown on a terminal, the log for ``polyfed watch``, trackers,
reports. None of them can change a result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Metrics = Mapping[str, int | float]


@dataclass(frozen=True)
class Event:
    """Something that happened in a run."""


@dataclass(frozen=True)
class Preparing(Event):
    """Data are read or computed, ``done`` of ``total`` (0: nobody knows); before a run begins, or while it runs."""

    what: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class RunStarted(Event):
    """A run of ``rounds`` rounds begins; ``done`` of them were done before it was resumed."""

    name: str
    rounds: int
    clients: int
    done: int = 0


@dataclass(frozen=True)
class RoundStarted(Event):
    """A round begins with the clients of ``cohort``."""

    round: int
    cohort: Sequence[str]


@dataclass(frozen=True)
class StepStarted(Event):
    """The server has asked some clients, not all of the cohort always, to perform a step."""

    step: str
    clients: Sequence[str]


@dataclass(frozen=True)
class ClientStarted(Event):
    """A client begins to work on a step."""

    client: str
    step: str


@dataclass(frozen=True)
class Working(Event):
    """A client or the server has done ``done`` of ``total`` parts of something (0: nobody knows how many)."""

    participant: str
    what: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class ClientDone(Event):
    """A client has answered a step of the round."""

    client: str
    step: str
    seconds: float


@dataclass(frozen=True)
class Incident(Event):
    """Something noteworthy befell a participant in a round.

    Attributes:
        round: in which.
        participant: whom.
        incident: ``client_excluded``, ``client_returned``, ``update_clipped``, ``weight_capped``, ``resumed``, ...
        reason: in a line.
        is_result: whether it belongs to what came out, as an exclusion does; not so that a run was resumed, which must
            leave the same records as a run that was not.
    """

    round: int
    participant: str
    incident: str
    reason: str
    is_result: bool = True


@dataclass(frozen=True)
class Measured(Event):
    """A participant was measured; ``kind`` is ``test``, ``validation`` or ``train``."""

    round: int
    participant: str
    kind: str
    metrics: Metrics
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # of metrics, over test items


@dataclass(frozen=True)
class RoundComplete(Event):
    """A round is complete and on disk; ``up`` and ``down`` are bytes that crossed.

    Round 0 is the state before training: nobody measures how long that takes.
    """

    round: int
    seconds: float | None
    up: int = 0
    down: int = 0


@dataclass(frozen=True)
class RunComplete(Event):
    """The run has ended; all that it left is in ``folder``."""

    folder: Path


class Callback:
    """Follows a run. This class does nothing; subclasses handle the events that they care for."""

    def handle(self, event: Event) -> None:
        """Take note of an event; called in the order in which they happen."""

    def happened_at(self, when: float) -> None:
        """The next event happened at this time (seconds since 1970); only replays say so."""

    def close(self) -> None:
        """The run is left, finished or not; whoever made the callback calls this, perhaps more than once."""


class Callbacks(Callback):
    """Several callbacks, each given every event.

    Args:
        callbacks: in the order in which they are called.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)

    def handle(self, event: Event) -> None:
        for callback in self._callbacks:
            callback.handle(event)

    def happened_at(self, when: float) -> None:
        for callback in self._callbacks:
            callback.happened_at(when)

    def close(self) -> None:
        # a stack closes the others when one raises, and raises after that
        with contextlib.ExitStack() as stack:
            for callback in self._callbacks:
                stack.callback(callback.close)

    # ---- what data, clients and the server say of their work, see ``polyfed.core.activity``

    def preparing(self, what: str, done: int, total: int) -> None:
        self.handle(Preparing(what, done, total))

    def client_started(self, client: str, step: str) -> None:
        self.handle(ClientStarted(client, step))

    def working(self, participant: str, what: str, done: int, total: int) -> None:
        self.handle(Working(participant, what, done, total))


def record_of(event: Event) -> dict[str, object] | None:
    """The line of ``metrics.jsonl`` that an event makes, if any."""
    match event:
        case Measured(round_number, participant, kind, metrics, intervals):
            line: dict[str, object] = {"round": round_number, "participant": participant, "kind": kind}
            return line | {"metrics": dict(metrics)} | ({"intervals": dict(intervals)} if intervals else {})
        # others go to history.jsonl: a resumed run has the same metrics.jsonl as one that was never stopped
        case Incident(round_number, participant, incident, reason, is_result=True):
            line = {"round": round_number, "participant": participant, "kind": "event"}
            return line | {"event": incident, "reason": reason}
    return None


class Recorder(Callback):
    """Collects the records of the round that goes on.

    Attributes:
        records: lines of ``metrics.jsonl`` that are not written yet.
    """

    def __init__(self) -> None:
        self.records: list[dict[str, object]] = []

    def handle(self, event: Event) -> None:
        if (record := record_of(event)) is not None:
            self.records.append(record)

    def take(self) -> list[dict[str, object]]:
        """The records, which are forgotten."""
        records, self.records = self.records, []
        return records
