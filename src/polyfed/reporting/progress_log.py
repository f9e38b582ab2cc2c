"""Progress that is shared: written down line by line, replayed elsewhere, or shown in several ways at once."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from polyfed.core.errors import RunError
from polyfed.core.untrusted import file_json
from polyfed.runs.progress import Metrics, Progress

if TYPE_CHECKING:
    from rich.console import RenderableType

log = logging.getLogger(__name__)

# what stands in a log; a line with any other name is not called
CALLS = (
    "run_started",
    "preparing",
    "round_started",
    "step_started",
    "client_started",
    "working",
    "client_done",
    "event",
    "evaluated",
    "traffic",
    "round_finished",
    "run_finished",
)
_FREQUENT = ("preparing", "working")
_SECONDS_BETWEEN = 1.0


class Relay(Progress, ABC):
    """Hands on all that it is told, as the name of the call and its arguments."""

    @abstractmethod
    def relay(self, call: str, **arguments: Any) -> None:
        """Hand on one call."""

    def preparing(self, what: str, done: int, total: int) -> None:
        """Hand on."""
        self.relay("preparing", what=what, done=done, total=total)

    def run_started(self, name: str, rounds: int, clients: int, *, done: int = 0) -> None:
        """Hand on."""
        self.relay("run_started", name=name, rounds=rounds, clients=clients, done=done)

    def round_started(self, round_number: int, cohort: Sequence[str]) -> None:
        """Hand on."""
        self.relay("round_started", round_number=round_number, cohort=cohort)

    def step_started(self, step: str, clients: Sequence[str]) -> None:
        """Hand on."""
        self.relay("step_started", step=step, clients=clients)

    def client_started(self, client: str, step: str) -> None:
        """Hand on."""
        self.relay("client_started", client=client, step=step)

    def working(self, participant: str, what: str, done: int, total: int) -> None:
        """Hand on."""
        self.relay("working", participant=participant, what=what, done=done, total=total)

    def client_done(self, client: str, step: str, seconds: float) -> None:
        """Hand on."""
        self.relay("client_done", client=client, step=step, seconds=seconds)

    def event(self, round_number: int, participant: str, event: str, reason: str) -> None:
        """Hand on."""
        self.relay("event", round_number=round_number, participant=participant, event=event, reason=reason)

    def evaluated(self, round_number: int, participant: str, kind: str, metrics: Metrics) -> None:
        """Hand on."""
        self.relay("evaluated", round_number=round_number, participant=participant, kind=kind, metrics=metrics)

    def traffic(self, round_number: int, up: int, down: int) -> None:
        """Hand on."""
        self.relay("traffic", round_number=round_number, up=up, down=down)

    def round_finished(self, round_number: int, seconds: float) -> None:
        """Hand on."""
        self.relay("round_finished", round_number=round_number, seconds=seconds)

    def run_finished(self, summary: RenderableType) -> None:
        """Hand on."""
        self.relay("run_finished", summary=summary)

    def happened_at(self, when: float) -> None:
        """Hand on."""
        self.relay("happened_at", when=when)


class Both(Relay):
    """Several progresses, each told everything.

    Args:
        progresses: whom to tell, in this order.
    """

    def __init__(self, *progresses: Progress) -> None:
        self._progresses = progresses

    def relay(self, call: str, **arguments: Any) -> None:
        """Tell all."""
        for progress in self._progresses:
            getattr(progress, call)(**arguments)

    def close(self) -> None:
        """Close all, the last first, even if one of them fails."""
        with contextlib.ExitStack() as stack:
            for progress in self._progresses:
                stack.callback(progress.close)


class FolderProgress(Both):
    """Tells where a run is once it begins, and so has passed all checks.

    Args:
        folder: of the run.
        tell: prints a line.
        progress: is told everything, after that.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None], progress: Progress) -> None:
        super().__init__(progress)
        self._folder = folder
        self._tell = tell

    def run_started(self, name: str, rounds: int, clients: int, *, done: int = 0) -> None:
        """Tell the folder first."""
        self._tell(f"run folder: {self._folder}")
        super().run_started(name, rounds, clients, done=done)


class LoggedProgress(Relay):
    """Appends a JSON line a call to a file, for ``follow`` to replay in another process.

    The file is opened when the run begins, when its folder must be there; what is told before is not written. How far a
    participant is with its work is written once a second at most. What an earlier process of the run wrote is
    kept but for a last line that was cut off. If the file cannot be written, one warning is logged and the run goes on.

    Args:
        path: such as ``progress.jsonl`` in the run folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: TextIO | None = None
        self._off = False
        self._written: dict[str, float] = {}  # frequent call -> when it was last written

    def relay(self, call: str, **arguments: Any) -> None:
        """Write the call with its time; of the report at the end only that there was one."""
        if self._off or call not in CALLS or (call in _FREQUENT and not self._is_due(call)):
            return
        kept = {name: _plain(value) for name, value in arguments.items() if name != "summary"}
        line = json.dumps({"at": round(time.time(), 6), "call": call, **kept})
        try:
            self._stream = self._stream or _opened(self._path)
            self._stream.write(line + "\n")
            self._stream.flush()
        except OSError as error:
            self._off = True
            log.warning("progress is no longer written to '%s': %s", self._path, error)

    def _is_due(self, call: str) -> bool:
        now = time.monotonic()
        if self._stream is None or now - self._written.get(call, -math.inf) < _SECONDS_BETWEEN:
            return False
        self._written[call] = now
        return True

    def close(self) -> None:
        """Close the file; a later call opens it again."""
        if self._stream is not None:
            with contextlib.suppress(OSError):  # a full disk was told of when a line did not fit
                self._stream.close()
            self._stream = None


def follow(
    path: Path,
    progress: Progress,
    *,
    poll: float = 0.2,
    finished: Callable[[], bool],
    summary: Callable[[], RenderableType] = lambda: "the run is finished",
) -> bool:
    """Replay a log onto ``progress`` from its beginning, and go on while it grows.

    A file that is not there yet and a line that is not complete yet are waited for. A file that was cut back or
    replaced is replayed anew, which begins with ``run_started``.

    Args:
        path: what ``LoggedProgress`` writes.
        progress: who is told; ``happened_at`` comes before each call.
        poll: seconds between looks at the file.
        finished: whether no process writes it any more; all lines that are there are replayed before the return.
        summary: gives what ``run_finished`` is told.

    Returns:
        Whether the last that was logged is the end of the run; if not, it was interrupted.

    Raises:
        RunError: a complete line is damaged.
    """
    tail, ended = _Tail(path), False
    while True:
        last = finished()  # asked before the look, so that nothing written before it is missed
        for line in tail.new_lines():
            call, at, arguments = _parsed(path, line)
            ended = call == "run_finished"
            progress.happened_at(at)
            getattr(progress, call)(**arguments, **({"summary": summary()} if ended else {}))
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


def _parsed(path: Path, line: bytes) -> tuple[str, float, dict[str, Any]]:
    try:
        content = file_json(line)
        call, at = str(content.pop("call")), float(content.pop("at"))
        if call not in CALLS:
            raise ValueError(f"unknown call '{call}', valid: {', '.join(CALLS)}")
        ending = {"summary": None} if call == "run_finished" else {}
        inspect.signature(getattr(Progress, call)).bind(None, **content, **ending)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        shown = line[:80].decode(errors="replace").strip()
        raise RunError(f"'{path}' has a damaged line ({error}): {shown}; delete the line or the file") from error
    return call, at, content


def _opened(path: Path) -> TextIO:
    """For appending; a last line without an end, left by a process that was killed, is cut away."""
    if path.is_file():
        with path.open("r+b") as stream:
            stream.truncate(_end_of_lines(stream))
    return path.open("a", encoding="utf-8")


def _end_of_lines(stream: BinaryIO, chunk: int = 1 << 16) -> int:
    """Where the last complete line ends, found from the end: the log of a long run is large."""
    end = stream.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - chunk)
        stream.seek(start)
        found = stream.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _plain(value: Any) -> Any:
    """Mappings and sequences of any class as JSON has them, numbers of any class as Python's."""
    if isinstance(value, str | bool | int):
        return value
    if isinstance(value, Sequence):
        return list(value)
    return {name: float(number) for name, number in value.items()} if hasattr(value, "items") else float(value)
