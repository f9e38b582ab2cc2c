"""A full-screen picture of a run while it goes on, in the process that runs it or in one that watches."""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import sys
from threading import RLock
from typing import TextIO

from rich.console import Console
from rich.live import Live

from polyfed.reporting.outcome import outcome_of
from polyfed.reporting.run_picture import RunPicture
from polyfed.reporting.run_state import RunState
from polyfed.runs.events import Callback, Event, Incident, Preparing, RunComplete, RunStarted
from polyfed.runs.records import RunRecords

_SHOWN_AS_EVENTS = ("polyfed.runs.session", "polyfed.runs.cohorts", "polyfed.runs.checkpoints")


class DashboardProgress(Callback):
    """Fills the terminal while a run goes on and gives it back at the end.

    It starts with the preparation, or before with ``show``; what is drawn follows the size of the terminal. Warnings of
    the library stand among the events; they, and all that is printed meanwhile, appear when the terminal is given back.

    Args:
        console: a terminal.
        records: what the run folder tells already, for a run that is watched or resumed.
    """

    def __init__(self, console: Console, records: RunRecords | None = None) -> None:
        self.state = RunState() if records is None else RunState.of(records)
        self._console = console
        self._lock = RLock()  # the display's own thread reads, the run's thread writes
        self._live = Live(
            console=console,
            screen=True,
            get_renderable=lambda: RunPicture(self.state, self._lock),
            refresh_per_second=2,
            redirect_stdout=False,  # rich would draw over it, and a traceback would be gone
            redirect_stderr=False,
        )
        self._warnings = _Warnings(self)
        self._redirections = contextlib.ExitStack()
        self._printed: list[tuple[TextIO, io.StringIO]] = []

    def show(self) -> None:
        """Take the terminal; nothing happens if it is taken already."""
        if self._live.is_started:
            return
        atexit.register(self.close)
        logging.getLogger("polyfed").addHandler(self._warnings)
        self._console.file = self._console.file  # the picture goes where stdout leads now
        # what anybody prints while the screen is taken would destroy the picture, and go with it
        self._printed = [(sys.stdout, io.StringIO()), (sys.stderr, io.StringIO())]
        self._redirections.enter_context(contextlib.redirect_stdout(self._printed[0][1]))
        self._redirections.enter_context(contextlib.redirect_stderr(self._printed[1][1]))
        self._live.start(refresh=True)

    def handle(self, event: Event) -> None:
        """Enter the event; how the run came out is printed at the end, below all else."""
        with self._lock:
            self.state.handle(event)
        if isinstance(event, Preparing | RunStarted):
            self.show()
            if isinstance(event, RunStarted):  # at once: whoever watches a short run may see no other picture
                self._live.refresh()
        elif isinstance(event, RunComplete):
            self.close()
            self._console.print(outcome_of(event.folder))

    def happened_at(self, when: float) -> None:
        self.state.happened_at(when)

    def close(self) -> None:
        atexit.unregister(self.close)
        logging.getLogger("polyfed").removeHandler(self._warnings)
        self._live.stop()
        self._redirections.close()
        printed, self._printed = self._printed, []
        for stream, text in printed:
            stream.write(text.getvalue())
            stream.flush()
        for line in self._warnings.take():
            if not any(line in text.getvalue() for _, text in printed):  # the command line prints warnings too
                self._console.print(line, style="yellow", markup=False, highlight=False)


class _Warnings(logging.Handler):
    """Shows warnings as events: a line that is printed on the screen of a dashboard is gone with its next picture."""

    def __init__(self, dashboard: DashboardProgress) -> None:
        super().__init__(logging.WARNING)
        self._dashboard = dashboard
        self._lines: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Show and keep a record; the run's own warnings are events already."""
        if record.name not in _SHOWN_AS_EVENTS:
            level, text = record.levelname.lower(), record.getMessage()
            self._lines[f"{level}: {text}"] = None
            self._dashboard.handle(Incident(self._dashboard.state.round, "polyfed", level, text, is_result=False))

    def take(self) -> list[str]:
        lines, self._lines = list(self._lines), {}
        return lines
