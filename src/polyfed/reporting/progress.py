"""What a person sees while a run goes on: bars on a terminal, one line a round elsewhere, or nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import singledispatchmethod
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from polyfed.core.untrusted import plain
from polyfed.reporting.outcome import outcome_of
from polyfed.reporting.recalls import is_context
from polyfed.reporting.tables import duration
from polyfed.runs.events import (
    Callback,
    Event,
    Incident,
    Measured,
    Metrics,
    Preparing,
    RoundComplete,
    RoundStarted,
    RunComplete,
    RunStarted,
)
from polyfed.runs.records import SERVER

if TYPE_CHECKING:
    from rich.console import Console

_LONG = 3.0  # seconds of preparation that a log file is told of
WINDOW = 5  # rounds that the estimate of the remaining time looks back


class PlainProgress(Callback):
    """One line a round and an event, for log files and pipes."""

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._clock = _Clock()
        self._metrics: dict[tuple[str, str], Metrics] = {}
        self._cohort = 0
        self._excluded = 0
        self._prepared, self._until = "", math.inf

    @singledispatchmethod
    def handle(self, event: Event) -> None:
        """Print what is worth a line."""

    @handle.register
    def _(self, event: Preparing) -> None:
        """Print what is read or computed, once, if it takes long."""
        if event.what != self._prepared:
            self._prepared, self._until = event.what, self._now() + _LONG
        elif self._now() > self._until:
            self._until = math.inf
            self._print(f"{event.what}: {event.done:,} of {event.total:,} ..." if event.total else f"{event.what} ...")

    @handle.register
    def _(self, event: RunStarted) -> None:
        self._clock = _Clock(event.rounds, event.done)
        self._print(started_line(event))

    @handle.register
    def _(self, event: RoundStarted) -> None:
        self._metrics, self._cohort, self._excluded = {}, len(event.cohort), 0

    @handle.register
    def _(self, event: Incident) -> None:
        self._excluded += event.incident == "client_excluded"
        self._print(incident_line(event))

    @handle.register
    def _(self, event: Measured) -> None:
        """Keep the metrics for the line of the round; those of training are in the report."""
        self._metrics[event.participant, event.kind] = event.metrics

    @handle.register
    def _(self, event: RoundComplete) -> None:
        if event.seconds is None:
            return
        self._clock.tick(event.round, event.seconds)
        answered = f"{self._cohort - self._excluded}/{self._cohort} clients" if self._cohort else "no client is asked"
        parts = [f"round {event.round}/{self._clock.rounds}", duration(event.seconds), answered]
        parts += [f"{participant}: {text}" for participant, text in summaries(self._metrics).items()]
        left = self._clock.left
        self._print("  ".join(parts + ([f"{duration(left)} left"] if left else [])))

    @handle.register
    def _(self, event: RunComplete) -> None:
        self._console.print(outcome_of(event.folder))

    def _print(self, text: str) -> None:
        self._console.print(plain(text), markup=False, highlight=False, soft_wrap=True)


def progress_for(console: Console) -> Callback:
    """Bars on a terminal, lines elsewhere."""
    from polyfed.reporting.bars import BarProgress

    return BarProgress(console) if console.is_terminal else PlainProgress(console)


class FolderLine(Callback):
    """Tells where a run is once it begins, and so has passed all checks.

    Args:
        folder: of the run.
        console: that the run is shown on; anything else would print into its bars.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console

    def handle(self, event: Event) -> None:
        """Tell the folder."""
        if isinstance(event, RunStarted):
            line = plain(f"run folder: {self._folder}")
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def started_line(event: RunStarted) -> str:
    """Name and size of the run."""
    resumed = f", resumed after round {event.done}" if event.done else ""
    return f"{event.name}: {event.rounds} rounds, {event.clients} clients{resumed}"


def incident_line(event: Incident) -> str:
    """What happened to whom."""
    return f"round {event.round}: {event.incident.replace('_', ' ')}: {event.participant}: {event.reason}"


def summaries(latest: Mapping[tuple[str, str], Metrics]) -> dict[str, str]:
    """One short text for the server and each kind of measurement, and one for all clients together.

    Args:
        latest: (participant, kind) -> its latest metrics.
    """
    texts: dict[str, str] = {}
    of_clients: dict[str, list[Metrics]] = {}
    for (participant, kind), metrics in latest.items():
        if participant == SERVER:
            texts[f"{SERVER} {kind}"] = _brief(metrics)
        else:
            of_clients.setdefault(kind, []).append(metrics)
    clients = {f"mean of {len(each)} clients {kind}": _brief_mean(each) for kind, each in of_clients.items()}
    return texts | clients


def _brief_mean(measured: Sequence[Metrics]) -> str:
    """Means over the clients that have a metric, with their number if these are not all."""
    values: dict[str, list[float]] = {}
    for metrics in measured:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    notes = {name: f" (of {len(each)})" for name, each in values.items() if len(each) < len(measured)}
    return _brief({name: fmean(each) for name, each in values.items()}, notes)


def _brief(metrics: Metrics, notes: Mapping[str, str] | None = None, most: int = 4) -> str:
    shown = [name for name in metrics if not is_context(name)][:most]
    return ", ".join(f"{name} {metrics[name]:.2f}{(notes or {}).get(name, '')}" for name in shown)


class _Clock:
    """Estimates the time that the remaining rounds will take from the latest ones."""

    def __init__(self, rounds: int = 0, done: int = 0) -> None:
        self.rounds = rounds
        self._done = done
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def tick(self, round_number: int, seconds: float) -> None:
        """A round took ``seconds``."""
        self._done = round_number
        self._seconds.append(seconds)

    @property
    def left(self) -> float:
        """Seconds; 0 at the end and before the first round."""
        return (self.rounds - self._done) * fmean(self._seconds) if self._seconds else 0.0
