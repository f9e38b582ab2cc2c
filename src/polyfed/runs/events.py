"""What happens in a run, as one stream of typed events: the callbacks that follow it, and the stream on disk.

Every follower of a run is a ``Callback``: what is shown on a terminal, the log for ``polyfed watch``, trackers,
reports. None of them can change a result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from polyfed.core.errors import RunError
from polyfed.core.files import cut_last_line
from polyfed.core.untrusted import file_json, typed

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
        cause: of an exclusion, see ``wire.messages.Cause``; nothing of other incidents, and in records of versions that
            did not tell it.
        is_result: whether it belongs to what came out, as an exclusion does; not so that a run was resumed, which must
            leave the same records as a run that was not.
    """

    round: int
    participant: str
    incident: str
    reason: str
    cause: str = ""
    is_result: bool = True

    @property
    def title(self) -> str:
        """What happened, in words: ``client excluded (late)``."""
        return self.incident.replace("_", " ") + (f" ({self.cause})" if self.cause else "")


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
    """A round is complete and on disk; ``up`` and ``down`` are bytes that crossed, ``replies`` how many clients' were
    used (None: of a version that did not say).

    Round 0 is the state before training: nobody measures how long that takes.
    """

    round: int
    seconds: float | None
    up: int = 0
    down: int = 0
    replies: int | None = None


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
        case Incident(round_number, participant, incident, reason, cause, is_result=True):
            line = {"round": round_number, "participant": participant, "kind": "event"}
            return line | {"event": incident, "reason": reason} | ({"cause": str(cause)} if cause else {})
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


log = logging.getLogger(__name__)

PROGRESS = "progress.jsonl"
"""Name of the log in a run folder."""
# names of classes come from a file that others may have written: only these are looked up, nothing is imported
LOGGED: Mapping[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}
"""What may stand in a log, by name."""
_FREQUENT = (Preparing, Working)
_SECONDS_BETWEEN = 1.0


class EventLog(Callback):
    """Appends a JSON line an event to a file, for ``follow`` to replay in another process.

    The file is opened when the run begins, when its folder must be there; what was measured or befell the run before
    comes then, other events are not written. How far a participant is with its work is written once a second at most.
    What an earlier process of the run wrote is kept but for a last line that was cut off. If the file cannot be
    written, one warning is logged and the run goes on.

    Args:
        path: such as ``progress.jsonl`` in the run folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: TextIO | None = None
        self._has_started = self._is_off = False
        self._early: list[Event] = []
        self._written: dict[type[Event], float] = {}  # frequent event -> when one was last written

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._has_started = True
            self._write(event)
            early, self._early = self._early, []
            for event in early:
                self._write(event)
        elif not self._has_started:
            self._early += [event] if isinstance(event, Incident | Measured) else []
        elif not isinstance(event, _FREQUENT) or self._is_due(type(event)):
            self._write(event)

    def _is_due(self, kind: type[Event]) -> bool:
        now = time.monotonic()
        if now - self._written.get(kind, -math.inf) < _SECONDS_BETWEEN:
            return False
        self._written[kind] = now
        return True

    def _write(self, event: Event) -> None:
        if self._is_off:
            return
        line = json.dumps({"at": round(time.time(), 6), "event": type(event).__name__, **_content(event)})
        try:
            self._stream = self._stream or _opened(self._path)
            self._stream.write(line + "\n")
            self._stream.flush()  # a line a write: whoever follows never sees the half of an event for long
        except OSError as error:
            self._is_off = True
            log.warning("progress is no longer written to '%s': %s", self._path, error)

    def close(self) -> None:
        """Close the file; a later event opens it again."""
        if self._stream is not None:
            with contextlib.suppress(OSError):  # a full disk was told of when a line did not fit
                self._stream.close()
            self._stream = None


def follow(path: Path, callback: Callback, folder: Path, *, poll: float = 0.2, finished: Callable[[], bool]) -> bool:
    """Replay a log for ``callback`` from its beginning, and go on while it grows.

    A file that is not there yet and a line that is not complete yet are waited for. A file that was cut back or
    replaced is replayed anew, which begins with ``RunStarted``.

    Args:
        path: what ``EventLog`` writes.
        callback: is given the events; ``happened_at`` comes before each.
        folder: of the run, as it is called here.
        poll: seconds between looks at the file.
        finished: whether no process writes it any more; all lines that are there are replayed before the return.

    Returns:
        Whether the last that was logged is the end of the run; if not, it was interrupted.

    Raises:
        RunError: a complete line is damaged.
    """
    tail, ended = _Tail(path), False
    while True:
        last = finished()  # asked before the look, so that nothing written before it is missed
        for line in tail.new_lines():
            event, at = _parsed(path, line, folder)
            ended = isinstance(event, RunComplete)
            callback.happened_at(at)
            callback.handle(event)
        if last:
            return ended
        time.sleep(poll)


class _Tail:
    """The complete lines of a growing file, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._last = b""

    def new_lines(self) -> Iterator[bytes]:
        """Those written since the last look; all, if the file is no longer the one that was read."""
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._offset - len(self._last))
            if stream.read(len(self._last)) != self._last:  # lines hold their time, so equal ones are the same
                self._offset, self._last = 0, b""
                stream.seek(0)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._offset, self._last = self._offset + len(line), line
                yield line


def _parsed(path: Path, line: bytes, folder: Path) -> tuple[Event, float]:
    try:
        content = file_json(line)
        name, at = str(content.pop("event")), float(content.pop("at"))
        if name not in LOGGED:
            raise ValueError(f"unknown event '{name}', valid: {', '.join(LOGGED)}")
        return (RunComplete(folder) if name == RunComplete.__name__ else typed(LOGGED[name], content)), at
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        shown = line[:80].decode(errors="replace").strip()
        raise RunError(f"'{path}' has a damaged line ({error}): {shown}; delete the line or the file") from error


def _opened(path: Path) -> TextIO:
    if path.is_file():
        cut_last_line(path)
    return path.open("a", encoding="utf-8")


def _content(event: Event) -> dict[str, Any]:
    """The fields of an event as JSON has them; a run may be watched where its folder has another name."""
    if isinstance(event, RunComplete):
        return {}
    return {item.name: _plain(getattr(event, item.name)) for item in dataclasses.fields(event)}


def _plain(value: Any) -> Any:
    """Mappings and sequences of any class as JSON has them, numbers of any class as Python's."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Sequence):
        return list(value)
    if not hasattr(value, "items"):
        return float(value)
    return {name: list(item) if isinstance(item, Sequence) else float(item) for name, item in value.items()}
