"""The progress of a run: bars on a terminal, one line for each round and event elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from threading import RLock

from rich.console import Console, OverflowMethod, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from polyfed.core.untrusted import plain
from polyfed.reporting.outcome import outcome_of
from polyfed.reporting.recalls import is_context
from polyfed.reporting.run_state import PREPARING, RunState, ticking
from polyfed.reporting.statistics import finite_mean
from polyfed.reporting.tables import duration
from polyfed.runs import events
from polyfed.runs.events import Callback
from polyfed.runs.records import SERVER

_LONG_PREPARATION = 3.0  # seconds; a log file is told of no shorter one
_LONGEST_BAR = 30  # columns
_MOST_METRICS = 4  # of a participant, in a line


def progress_for(console: Console) -> Callback:
    """Bars on a terminal, and in a notebook that has ipywidgets; lines elsewhere."""
    shows_bars = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
    return BarProgress(console) if shows_bars else PlainProgress(console)


class FolderLine(Callback):
    """Prints the run folder when the run begins, and so has passed all checks.

    Args:
        folder: of the run.
        console: that the run is shown on; anything else would print into its bars.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console

    def handle(self, event: events.Event) -> None:
        if isinstance(event, events.RunStarted):
            _print_line(self._console, f"run folder: {self._folder}")


class PlainProgress(Callback):
    """Prints one line for each round and event, for log files and pipes."""

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._state = RunState()
        self._metrics: dict[tuple[str, str], events.Metrics] = {}  # of the round
        self._cohort = self._excluded = 0
        self._preparation, self._due = "", math.inf

    def handle(self, event: events.Event) -> None:
        self._state.handle(event)
        match event:
            case events.Preparing(what, done, total):
                self._prepare(what, f"{what}: {done:,} of {total:,} ..." if total else f"{what} ...")
            case events.RunStarted() | events.Incident():
                self._excluded += isinstance(event, events.Incident) and event.incident == "client_excluded"
                _print_line(self._console, event_line(event))
            case events.RoundStarted(_, cohort):
                self._metrics, self._cohort, self._excluded = {}, len(cohort), 0
            case events.Measured(_, participant, kind, metrics):
                self._metrics[participant, kind] = metrics
            case events.RoundComplete(number, seconds) if seconds is not None:
                _print_line(self._console, "  ".join(self._round_parts(number, seconds)))
            case events.RunComplete(folder):
                self._console.print(outcome_of(folder))

    def _prepare(self, what: str, line: str) -> None:
        if what != self._preparation:
            self._preparation, self._due = what, self._now() + _LONG_PREPARATION
        elif self._now() > self._due:
            self._due = math.inf
            _print_line(self._console, line)

    def _round_parts(self, number: int, seconds: float) -> Iterator[str]:
        yield f"round {number}/{self._state.rounds}"
        yield duration(seconds)
        answered = self._cohort - self._excluded
        yield f"{answered}/{self._cohort} clients" if self._cohort else "no client is asked"
        yield from (f"{participant}: {text}" for participant, text in summaries(self._metrics).items())
        if self._state.left:
            yield f"{duration(self._state.left)} left"


class BarProgress(Callback, Progress):
    """Bars of the rounds, of the clients and of who is at work, below the events; the result takes their place.

    Args:
        console: a terminal.
    """

    def __init__(self, console: Console) -> None:
        self.state = RunState()
        self._metrics: dict[tuple[str, str], events.Metrics] = {}
        self._state_lock = RLock()  # the display's own thread reads, the run's thread writes
        only_ascii = console.options.ascii_only
        # rich's own ellipsis cannot be written where only ASCII can
        self._overflow: OverflowMethod = "crop" if only_ascii else "ellipsis"
        self._label = Column(no_wrap=True, overflow=self._overflow)
        self._bar = BarColumn(table_column=Column(no_wrap=True))
        super().__init__(
            SpinnerColumn("line" if only_ascii else "dots"),
            TextColumn("{task.description}", markup=False, table_column=self._label),
            self._bar,
            TextColumn("{task.fields[text]}", markup=False, table_column=self._flexible()),
            console=console,
            refresh_per_second=5,
            expand=True,
        )
        for label in ("rounds", "clients", PREPARING):
            self.add_task(label, visible=False, text="")
        for row in self.tasks[:2]:
            row.finished_time = 0.0  # the spinner stands before who is at work alone

    def handle(self, event: events.Event) -> None:
        """Enter the event; print what stays above the bars."""
        with self._state_lock:
            self.state.handle(event)
            if isinstance(event, events.Measured) and event.kind != "train":
                self._metrics[event.participant, event.kind] = event.metrics
        if isinstance(event, events.Preparing | events.RunStarted) and not self.live.is_started:
            self.start()
        if isinstance(event, events.RunStarted):
            _print_line(self.console, event_line(event))
        elif isinstance(event, events.Incident):
            _print_line(self.console, event_line(event), style="yellow")
        elif isinstance(event, events.RunComplete):
            self.live.transient = True
            self.close()
            self.console.print(outcome_of(event.folder))

    def happened_at(self, when: float) -> None:
        self.state.happened_at(when)

    def close(self) -> None:
        self.live.stop()

    def get_renderables(self) -> Iterable[RenderableType]:
        """The latest metrics, and the bars: what rich draws five times a second."""
        with self._state_lock:
            if self._metrics:
                metrics = Table.grid(Column(no_wrap=True), self._flexible(), padding=(0, 2), expand=True)
                for participant, text in summaries(self._metrics).items():
                    metrics.add_row(Text(participant, "bold"), Text(text))
                yield metrics
            if self.tasks:  # rich asks for the first time before there are any
                self._update_rows()
            yield self.make_tasks_table(self.tasks)

    def _flexible(self) -> Column:
        return Column(ratio=1, no_wrap=True, overflow=self._overflow)

    def _update_rows(self) -> None:
        state, (rounds, clients, work) = self.state, self.tasks
        longest = max(map(len, [*state.clients, PREPARING]))
        self._label.width = min(longest, max(9, self.console.width // 4 - 2))
        self._bar.bar_width = max(4, min(_LONGEST_BAR, self.console.width - self._label.width - 46))
        left = "" if state.left is None else f", about {ticking(max(1.0, state.left))} left"
        rounds.visible, rounds.total, rounds.completed = bool(state.rounds), 1.0, state.share
        rounds.fields["text"] = f"{state.rounds_done}/{state.rounds}  {ticking(state.elapsed)}{left}"
        done = sum(client.status == "done" for client in state.clients.values())
        clients.visible, clients.total = state.running and bool(state.step), max(1, len(state.clients))
        clients.completed = state.step_share
        clients.fields["text"] = f"{done}/{len(state.clients)}  {state.step}"
        activity = state.activity
        work.visible = activity is not None
        if activity is not None:
            # without a total the bar moves to and fro: nobody knows how much there is to do
            work.description, work.total = activity.who, None if activity.share is None else 1.0
            work.completed = activity.share or 0.0
            work.fields["text"] = "  ".join(filter(None, [activity.count, activity.words]))


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


def event_line(event: events.RunStarted | events.Incident) -> str:
    """Name and size of the run, or what happened to whom."""
    if isinstance(event, events.Incident):
        return f"round {event.round}: {event.incident.replace('_', ' ')}: {event.participant}: {event.reason}"
    resumed = f", resumed after round {event.done}" if event.done else ""
    return f"{event.name}: {event.rounds} rounds, {event.clients} clients{resumed}"


def _print_line(console: Console, text: str, style: str = "") -> None:
    console.print(plain(text), style=style, markup=False, highlight=False, soft_wrap=True)
