"""A full-screen picture of a run while it goes on, in the process that runs it or in one that watches."""

from __future__ import annotations

import atexit
import io
import logging
import sys
from threading import RLock
from typing import TYPE_CHECKING, TextIO

from polyfed.reporting.outcome import outcome_of
from polyfed.reporting.run_picture import Picture
from polyfed.reporting.run_state import RunState
from polyfed.runs.events import Callback, Event, Incident, Preparing, RunComplete, RunStarted
from polyfed.runs.records import RunRecords

if TYPE_CHECKING:
    from rich.console import Console

_TOLD_AS_EVENTS = ("polyfed.runs.session", "polyfed.runs.cohorts", "polyfed.runs.checkpoints")


class DashboardProgress(Callback):
    """Fills the terminal while a run goes on and gives it back at the end.

    It starts with the preparation, or before with ``show``; what is drawn follows the size of the terminal. Warnings of
    the library stand among the events; they, and all that is printed meanwhile, appear when the terminal is given back.

    Args:
        console: a terminal.
        records: what the run folder tells already, for a run that is watched or resumed.
    """

    def __init__(self, console: Console, records: RunRecords | None = None) -> None:
        from rich.live import Live

        self.state = RunState() if records is None else RunState.of(records)
        self._console = console
        self._lock = RLock()  # the display's own thread reads, the run's thread writes
        self._live = Live(
            console=console,
            screen=True,
            get_renderable=self._picture,
            refresh_per_second=2,
            redirect_stdout=False,  # rich would draw over it, and a traceback would be gone
            redirect_stderr=False,
        )
        self._warnings = _Warnings(self)
        self._held = _Held()

    def show(self) -> None:
        """Take the terminal; nothing happens if it is taken already."""
        if not self._live.is_started:
            logging.getLogger("polyfed").addHandler(self._warnings)
            atexit.register(self.close)
            self._held.start()
            self._live.start(refresh=True)

    def handle(self, event: Event) -> None:
        """Enter the event; how the run came out is printed at the end, below all else."""
        with self._lock:
            self.state.handle(event)
        if isinstance(event, Preparing | RunStarted):
            self.show()
        elif isinstance(event, RunComplete):
            self.close()
            self._console.print(outcome_of(event.folder))

    def happened_at(self, when: float) -> None:
        """Times of what happens next count from then."""
        self.state.happened_at(when)

    def close(self) -> None:
        """Give the terminal back."""
        atexit.unregister(self.close)
        logging.getLogger("polyfed").removeHandler(self._warnings)
        self._live.stop()
        told = self._held.stop()
        for line in self._warnings.take():
            if line not in told:  # the command line prints warnings too
                self._console.print(line, style="yellow", markup=False, highlight=False)

    def _picture(self) -> Picture:
        return Picture(self.state, self._lock)


class _Held:
    """Keeps what anybody prints while the screen is taken: it would destroy the picture, and go with it."""

    def __init__(self) -> None:
        self._kept: tuple[_Kept, ...] = ()

    def start(self) -> None:
        """Keep from now on."""
        self._kept = sys.stdout, sys.stderr = _Kept(sys.stdout), _Kept(sys.stderr)

    def stop(self) -> str:
        """Print what was kept where it was to go, and return it."""
        if not self._kept:
            return ""
        streams = [kept.rich_proxied_file for kept in self._kept]
        sys.stdout, sys.stderr = streams
        texts, self._kept = [kept.getvalue() for kept in self._kept], ()
        for stream, text in zip(streams, texts, strict=True):
            stream.write(text)
            stream.flush()
        return "".join(texts)


class _Kept(io.StringIO):
    """Stands for a stream; rich, which draws the picture, goes by the attribute's name to the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.rich_proxied_file = stream


class _Warnings(logging.Handler):
    """Warnings as events: a line that is printed on the screen of a dashboard is gone with its next picture."""

    def __init__(self, dashboard: DashboardProgress) -> None:
        super().__init__(logging.WARNING)
        self._dashboard = dashboard
        self._lines: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Show and keep a record; the run's own warnings are events already."""
        if record.name not in _TOLD_AS_EVENTS:
            text = record.getMessage()
            self._lines[f"{record.levelname.lower()}: {text}"] = None
            self._dashboard.handle(
                Incident(self._dashboard.state.round, "polyfed", record.levelname.lower(), text, is_result=False)
            )

    def take(self) -> list[str]:
        """What was kept since the last time."""
        lines, self._lines = list(self._lines), {}
        return lines
