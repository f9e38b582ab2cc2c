"""The progress of a run: a picture of it on a terminal, one line for each round and event elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from threading import Event, RLock, Thread

from rich.console import Console, Group
from rich.live import Live

from polyfed.core.untrusted import plain
from polyfed.reporting.outcome import outcome_of
from polyfed.reporting.recalls import is_context
from polyfed.reporting.run_picture import run_picture
from polyfed.reporting.run_state import RunState, incident_line
from polyfed.reporting.statistics import finite_mean
from polyfed.reporting.tables import duration
from polyfed.runs import events
from polyfed.runs.events import Callback
from polyfed.runs.records import PACE, SERVER

_LONG_PREPARATION = 3.0  # seconds; a log file is told of no shorter one
_SILENCE = 10.0  # seconds without a line, at most
_LOOK = 0.2  # seconds between two looks at the clock
_MOST_METRICS = 4  # of a participant, in a line


def progress_for(console: Console) -> Callback:
    """A picture on a terminal, and in a notebook that has ipywidgets; lines elsewhere."""
    is_live = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
    return LiveProgress(console) if is_live else PlainProgress(console)


class FolderLine(Callback):
    """Prints the run folder when the run begins, and so has passed all checks.

    Args:
        folder: of the run.
        console: that the run is shown on; anything else would print into its picture.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console

    def handle(self, event: events.Event) -> None:
        if isinstance(event, events.RunStarted):
            _print_line(self._console, f"run folder: {self._folder}")


class PlainProgress(Callback):
    """Prints one line for each round and event, and what goes on where none was printed for ten seconds; for log files
    and pipes."""

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._state = RunState()
        self._metrics: dict[tuple[str, str], events.Metrics] = {}  # of the round
        self._cohort = 0
        self._part, self._far, self._began, self._due = "", "", now(), math.inf
        self._lock, self._closed = RLock(), Event()  # what takes long may tell nothing: a thread of its own looks
        self._watch: Thread | None = None

    def handle(self, event: events.Event) -> None:
        with self._lock:
            self._handle(event)
            if self._watch is None:
                self._watch = Thread(target=self._look, daemon=True)
                self._watch.start()

    def close(self) -> None:
        with self._lock:  # so that no line follows
            self._closed.set()

    def look(self) -> None:
        """Say what goes on if that is due: which part, how far, and for how long."""
        with self._lock:
            if self._part and self._now() >= self._due:
                number = f"round {self._state.round}/{self._state.rounds}: " if self._state.rounds else ""
                self._tell(f"{number}{self._part}{self._far} ... {duration(self._now() - self._began)}")

    def _look(self) -> None:
        while not self._closed.wait(_LOOK):
            with self._lock:
                if not self._closed.is_set():
                    self.look()

    def _handle(self, event: events.Event) -> None:
        self._state.handle(event)
        match event:
            case events.Preparing(what, done, total):
                self._goes_on(what, done, total)
            case events.Working(participant, what, done, total):
                self._goes_on(f"{participant}: {what}", done, total)
            case events.ClientStarted(client, step):
                self._goes_on(f"{client}: {step}")
            case events.RunStarted():
                self._tell(run_line(event))
            case events.Incident():
                self._tell(incident_line(event))
            case events.RoundStarted(_, cohort):
                self._metrics, self._cohort = {}, len(cohort)
            case events.Measured(_, participant, kind, metrics):
                self._metrics[participant, kind] = metrics
            case events.RoundComplete(number, seconds) if seconds is not None:
                self._tell("  ".join(self._round_parts(number, seconds)))
            case events.RunComplete(folder):
                self._part = ""
                self._console.print(outcome_of(folder))

    def _goes_on(self, part: str, done: int = 0, total: int = 0) -> None:
        self._far = f": {done:,} of {total:,}" if total else ""
        if part != self._part:
            silent_until = self._now() + (_SILENCE if self._state.rounds else _LONG_PREPARATION)
            self._part, self._began, self._due = part, self._now(), min(self._due, silent_until)

    def _tell(self, line: str) -> None:
        self._due = self._now() + _SILENCE
        _print_line(self._console, line)

    def _round_parts(self, number: int, seconds: float) -> Iterator[str]:
        yield f"round {number}/{self._state.rounds}"
        yield duration(seconds)
        replies = self._metrics.get((SERVER, PACE), {}).get("replies", math.inf)  # of all steps, where time is kept
        excluded = sum(status == "excluded" for status in self._state.clients.values())
        answered = min(self._cohort - excluded, replies)
        yield f"{answered:g}/{self._cohort} clients" if self._cohort else "no client is asked"
        yield from (f"{participant}: {text}" for participant, text in summaries(self._metrics).items())
        if self._state.left:
            yield f"{duration(self._state.left)} left"


class LiveProgress(Callback):
    """A picture of the run below its events, redrawn four times a second; how the run came out takes its place.

    Args:
        console: a terminal, or that of a notebook.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._state = console, RunState()
        self._lock = RLock()  # the display's own thread reads, the run's thread writes
        self._live = Live(console=console, get_renderable=self._picture, refresh_per_second=4, vertical_overflow="crop")

    def show(self) -> None:
        """Begin to draw; nothing happens if it is drawn already."""
        self._live.start(refresh=True)

    def handle(self, event: events.Event) -> None:
        """Enter the event; print what stays above the picture."""
        with self._lock:
            self._state.handle(event)
        match event:
            case events.Preparing():
                self.show()
            case events.RunStarted():
                self.show()
                _print_line(self._console, run_line(event))
            case events.Incident():
                _print_line(self._console, incident_line(event), style="yellow")
            case events.RunComplete(folder):
                self._live.transient = True
                self.close()
                self._console.print(outcome_of(folder))

    def happened_at(self, when: float) -> None:
        self._state.happened_at(when)

    def close(self) -> None:
        self._live.stop()

    def _picture(self) -> Group:
        with self._lock:  # all is text when it is returned, so the state may change while it is printed
            return run_picture(self._state)


def summaries(latest: Mapping[tuple[str, str], events.Metrics]) -> dict[str, str]:
    """One short text for the server and each kind of measurement, and one for all clients together.

    A mean over clients says over how many if not all of those measured have the metric.

    Args:
        latest: (participant, kind) -> its latest metrics.
    """
    texts: dict[str, str] = {}
    of_clients: dict[str, list[events.Metrics]] = {}
    for (participant, kind), metrics in latest.items():
        if participant == SERVER:
            texts[f"{SERVER} {kind}"] = _brief({name: [value] for name, value in metrics.items()}, 1)
        else:
            of_clients.setdefault(kind, []).append(metrics)
    for kind, measured in of_clients.items():
        names = dict.fromkeys(chain(*measured))
        values = {name: [metrics[name] for metrics in measured if name in metrics] for name in names}
        texts[f"mean of {len(measured)} clients {kind}"] = _brief(values, len(measured))
    return texts


def _brief(values: Mapping[str, Sequence[float]], participants: int) -> str:
    shown = [name for name in values if not is_context(name)][:_MOST_METRICS]
    counts = {name: f" (of {len(values[name])})" if len(values[name]) < participants else "" for name in shown}
    return ", ".join(f"{name} {finite_mean(values[name]):.2f}{counts[name]}" for name in shown)


def run_line(event: events.RunStarted) -> str:
    """Name and size of a run that begins."""
    resumed = f", resumed after round {event.done}" if event.done else ""
    return f"{event.name}: {event.rounds} rounds, {event.clients} clients{resumed}"


def _print_line(console: Console, text: str, style: str = "") -> None:
    console.print(plain(text), style=style, markup=False, highlight=False, soft_wrap=True)
