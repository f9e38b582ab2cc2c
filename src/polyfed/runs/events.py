"""Events of a run on the stream of ``core.activity``, their records, and the stream on disk.

Each follower of a run is a ``Callback``: the terminal, the log for ``polyfed watch``, trackers, reports. None of them
can change a result.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from polyfed.core.activity import Callback as Callback
from polyfed.core.activity import ClientStarted as ClientStarted
from polyfed.core.activity import Event as Event
from polyfed.core.activity import Preparing as Preparing
from polyfed.core.activity import Working as Working
from polyfed.core.errors import RunError
from polyfed.core.files import cut_last_line
from polyfed.core.untrusted import file_json, typed

Metrics = Mapping[str, int | float]


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
    """The server has asked clients, perhaps not all of the cohort, to perform a step."""

    step: str
    clients: Sequence[str]


@dataclass(frozen=True)
class ClientDone(Event):
    """A client has answered a step of the round."""

    client: str
    step: str
    seconds: float


@dataclass(frozen=True)
class Incident(Event):
    """An incident of a participant in a round.

    Attributes:
        round: Number of the round.
        participant: Id of the client, or ``server``.
        incident: ``client_excluded``, ``client_returned``, ``update_clipped``, ``weight_capped``, ``resumed``, ...
        reason: One line.
        cause: Cause of an exclusion, see ``wire.messages.Cause``; empty for other incidents and in old records.
        is_result: True if it belongs to the outcome, like an exclusion; false for a resumption, which must leave the
            same records as a run without one.
    """

    round: int
    participant: str
    incident: str
    reason: str
    cause: str = ""
    is_result: bool = True

    @property
    def title(self) -> str:
        """The incident in words: ``client excluded (late)``."""
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
    """A round is complete and on disk.

    Attributes:
        round: Its number; round 0 is the state before training.
        seconds: Wall time; None for round 0.
        up, down: Bytes that crossed.
        replies: Number of clients with replies in use; None in records of old versions.
    """

    round: int
    seconds: float | None
    up: int = 0
    down: int = 0
    replies: int | None = None


@dataclass(frozen=True)
class RunComplete(Event):
    """The run has ended; its records are in ``folder``."""

    folder: Path


class Callbacks(Callback):
    """Several callbacks, each given every event, in this order."""

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


def record_of(event: Event) -> dict[str, object] | None:
    """The line of ``metrics.jsonl`` that an event makes, if any."""
    match event:
        case Measured(number, participant, measured, metrics, intervals):
            line: dict[str, object] = {"round": number, "participant": participant, "kind": measured}
            return line | {"metrics": dict(metrics)} | ({"intervals": dict(intervals)} if intervals else {})
        # others go to history.jsonl: a resumed run has the same metrics.jsonl as one that was never stopped
        case Incident(number, participant, incident, reason, cause, is_result=True):
            line = {"round": number, "participant": participant, "kind": "event"}
            return line | {"event": incident, "reason": reason} | ({"cause": str(cause)} if cause else {})
    return None


class Recorder(Callback):
    """Collects the records of the current round: lines of ``metrics.jsonl`` that are not written yet."""

    def __init__(self) -> None:
        self.records: list[dict[str, object]] = []

    def handle(self, event: Event) -> None:
        if (record := record_of(event)) is not None:
            self.records.append(record)

    def take(self) -> list[dict[str, object]]:
        """Return and clear the records."""
        records, self.records = self.records, []
        return records


log = logging.getLogger(__name__)

PROGRESS = "progress.jsonl"
"""Name of the log in a run folder."""
# names of classes come from a file that others may have written: only these are looked up, nothing is imported
LOGGED: Mapping[str, type[Event]] = {event.__name__: event for event in Event.__subclasses__()}
"""Events of a log by name."""
_FREQUENT = (Preparing, Working)
_SECONDS_BETWEEN = 1.0


class EventLog(Callback):
    """Appends one JSON line per event to a file, for ``follow`` to replay in another process.

    The file is opened when the run begins, when its folder must exist; earlier measurements and incidents are written
    then, other events before it are not. Progress of a participant's work is written once per second at most. Lines of
    an earlier process of the run are kept, except a last line that was cut off. If the file cannot be written, one
    warning is logged and the run goes on.

    Args:
        path: File such as ``progress.jsonl`` in the run folder.
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
            early, self._early = [event, *self._early], []
            for each in early:
                self._write(each)
        elif not self._has_started:
            self._early += [event] if isinstance(event, Incident | Measured) else []
        elif not isinstance(event, _FREQUENT) or self._is_due(type(event)):
            self._write(event)

    def _is_due(self, event: type[Event]) -> bool:
        now = time.monotonic()
        if now - self._written.get(event, -math.inf) < _SECONDS_BETWEEN:
            return False
        self._written[event] = now
        return True

    def _write(self, event: Event) -> None:
        if self._is_off:
            return
        # a run may be watched where its folder has another name
        content = {} if isinstance(event, RunComplete) else vars(event)
        line = json.dumps({"at": round(time.time(), 6), "event": type(event).__name__, **content}, default=_plain)
        try:
            self._stream = self._stream or _opened(self._path)
            self._stream.write(line + "\n")
            self._stream.flush()  # line by line: a follower never sees half an event for long
        except OSError as error:
            self._is_off = True
            log.warning("progress is no longer written to '%s': %s", self._path, error)

    def close(self) -> None:
        """Close the file; a later event opens it again."""
        if self._stream is not None:
            with contextlib.suppress(OSError):  # a full disk was reported when a line did not fit
                self._stream.close()
            self._stream = None


def follow(path: Path, callback: Callback, folder: Path, *, poll: float = 0.2, finished: Callable[[], bool]) -> bool:
    """Replay a log for ``callback`` from its beginning, and go on while it grows.

    A file that does not exist yet and a line that is incomplete are waited for. A file that was cut back or replaced is
    replayed anew, beginning with ``RunStarted``.

    Args:
        path: File of an ``EventLog``.
        callback: Receives the events; ``happened_at`` comes before each.
        folder: Path of the run here.
        poll: Seconds between looks at the file.
        finished: True once no process writes it; all lines that exist are replayed before the return.

    Returns:
        True if the last event is the end of the run; if not, it was interrupted.

    Raises:
        RunError: a complete line is damaged.
    """
    tail, ended = _Tail(path), False
    while True:
        last = finished()  # before the look, so that no line written before it is missed
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
        """Lines written since the last look; all lines, if the file was replaced."""
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


def _plain(value: Any) -> Any:
    """Mappings and sequences of any class for JSON, numbers of any class as Python's."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) else float(value)
