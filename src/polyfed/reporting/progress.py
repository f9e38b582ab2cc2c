"""The progress of a run: a live display on a terminal, one line per round and event elsewhere."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from threading import Event as Flag
from threading import RLock, Thread

from rich.console import Console, Group, RenderableType, group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from polyfed.core.untrusted import plain
from polyfed.reporting.metrics import EVALUATIONS, PREFERRED, chance_of, common_chance, quality_names, scale_of
from polyfed.reporting.statistics import finite_mean, finite_values
from polyfed.reporting.summary import RunSummary
from polyfed.reporting.tables import count, duration, format_number, mib
from polyfed.runs import events
from polyfed.runs.events import Callback, Event, Incident, Metrics, Working
from polyfed.runs.opened import open_run
from polyfed.runs.records import SERVER

_WINDOW = 5  # rounds behind the estimate of the remaining time
_KINDS = ("test", "validation", "train")
_MOST_METRICS, _MOST_INCIDENTS = 8, 4  # in the live display
_LONG_PREPARATION = 3.0  # seconds; shorter ones are not logged
_SILENCE = 10.0  # seconds without a line, at most
_LOOK = 0.2  # seconds between two readings of the clock
_Metric = tuple[str, str, str]  # ``server`` or ``clients``, kind, name


def progress_for(console: Console) -> Callback:
    """A live display on a terminal, and in a notebook with ipywidgets; lines elsewhere."""
    is_live = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
    return LiveProgress(console) if is_live else PlainProgress(console)


# ---- state of a run in progress


@dataclass
class RunState(Callback):
    """State of a run from its events; a repeated event changes nothing."""

    name: str = ""
    rounds: int = 0  # T, 0 if not known yet
    round: int = 0  # the current or last one, 0 before the first
    running: bool = False  # a round has begun and is not complete
    finished: bool = False  # the run has ended
    step: str = ""  # that the clients perform
    clients: dict[str, str] = field(default_factory=dict)  # in this step -> waiting, working, done or excluded
    work: Working | None = None  # the latest report of work; without a participant while data are prepared
    # of the latest two rounds, by participant
    metrics: dict[_Metric, dict[int, dict[str, float]]] = field(default_factory=dict)
    chances: dict[_Metric, dict[str, float]] = field(default_factory=dict)  # value of guessing, by participant
    complete: dict[int, events.RoundComplete] = field(default_factory=dict)
    incidents: dict[Incident, None] = field(default_factory=dict)  # in order
    clock: Callable[[], float] = time.time
    _began: float = 0.0
    _work_began: float = 0.0
    _at: float | None = None

    def handle(self, event: Event) -> None:
        match event:
            case events.RunStarted(name, rounds, _, done):
                self.name, self.rounds, self.round, self.running, self.finished = name, rounds, done, False, False
                self.clients, self.step, self.work = {}, "", None
                self._forget_after(done)
            case events.RoundStarted(number, cohort):
                self.round, self.running, self.step, self.work = number, True, "", None
                self.clients, self._began = dict.fromkeys(cohort, "waiting"), self._now()
            case Incident():
                self.incidents[event] = None
                if event.incident == "client_excluded" and self.running and event.round == self.round:
                    self.clients[event.participant] = "excluded"
            case events.Measured():
                self._measure(event)
            case events.RoundComplete(number, seconds) if seconds is not None:  # the state before training has no time
                self.round, self.running, self.work, self.complete[number] = number, False, None, event
            case events.RunComplete():
                self.running, self.finished, self.work = False, True, None
            case _:
                self._follow_work(event)

    def _follow_work(self, event: Event) -> None:
        match event:
            case events.StepStarted(step, clients):
                self.step, self.work = step, None
                excluded = {client: status for client, status in self.clients.items() if status == "excluded"}
                self.clients = dict.fromkeys(clients, "waiting") | excluded
            case events.ClientStarted(client, step):
                self._enter(step)
                self.clients[client] = "working"
                self._report(Working(client, step))
            case events.ClientDone(client, step):
                self._enter(step)
                self.clients[client], self.work = "done", None
            case Working():
                self._report(event)
            case events.Preparing(what, done, total):
                self._report(Working("", what, done, total))

    def _enter(self, step: str) -> None:
        """Begin a step without an announcement: all clients that are not excluded wait."""
        if step != self.step:
            self.handle(events.StepStarted(step, list(self.clients)))

    def _report(self, work: Working) -> None:
        if self.work is None or (self.work.participant, self.work.what) != (work.participant, work.what):
            self._work_began = self._now()
        self.work = work

    def _measure(self, event: events.Measured) -> None:
        group = SERVER if event.participant == SERVER else "clients"
        for name in quality_names([event.metrics]):
            by_round = self.metrics.setdefault((group, event.kind, name), {})
            self.chances.setdefault((group, event.kind, name), {})[event.participant] = chance_of(name, event.metrics)
            by_round.setdefault(event.round, {})[event.participant] = event.metrics[name]
            for number in sorted(by_round)[:-2]:
                del by_round[number]

    def _forget_after(self, done: int) -> None:
        """Forget rounds after the last complete one, which a resumed run repeats."""
        self.complete = {number: event for number, event in self.complete.items() if number <= done}
        self.incidents = {incident: None for incident in self.incidents if incident.round <= done}
        for metric, by_round in self.metrics.items():
            self.metrics[metric] = {number: values for number, values in by_round.items() if number <= done}

    def happened_at(self, when: float) -> None:
        self._at = when

    def _now(self) -> float:
        return self.clock() if self._at is None else self._at

    @property
    def elapsed(self) -> float:
        """Seconds of all complete rounds and of the current one, without pauses between processes."""
        return sum(event.seconds or 0.0 for event in self.complete.values()) + self._spent

    @property
    def _spent(self) -> float:
        return max(0.0, self.clock() - self._began) if self.running else 0.0

    @property
    def left(self) -> float | None:
        """Remaining seconds if the remaining rounds are like the latest; None before the first is complete."""
        if not self.complete or not self.rounds:
            return None
        a_round = finite_mean([self.complete[number].seconds or 0.0 for number in sorted(self.complete)[-_WINDOW:]])
        return max(0.0, (self.rounds - self.round + self.running) * a_round - min(self._spent, a_round))

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes up and down."""
        return sum(event.up for event in self.complete.values()), sum(event.down for event in self.complete.values())

    @property
    def step_in_words(self) -> str:
        """Progress of the clients in their step."""
        counts = Counter(self.clients.values())
        parts = [f"{counts['done']}/{len(self.clients)} clients done"] if self.clients else ["no client is asked"]
        parts += [f"{counts[status]} {status}" for status in ("working", "excluded") if counts[status]]
        return ", ".join(parts) + (f" ({self.step})" if self.step else "")

    @property
    def work_in_words(self) -> str:
        """Current work with its participant, progress and time; empty without a report."""
        if (work := self.work) is None:
            return ""
        far = f" {work.done:,} of {work.total:,}" if work.total else ""
        return f"{work.participant or 'preparing'}: {work.what}{far}, {max(0.0, self.clock() - self._work_began):.0f} s"

    def latest(self) -> Iterator[tuple[_Metric, float, float]]:
        """Metrics with their last values, of clients the mean, and the change since the round before, if any.

        Order: test before other kinds, the server before clients, main metrics before others.
        """

        def rank(metric: _Metric) -> tuple[int, bool, bool]:
            group, source, name = metric
            return _KINDS.index(source) if source in _KINDS else len(_KINDS), group != SERVER, name not in PREFERRED

        for metric in sorted(self.metrics, key=rank):
            by_round = self.metrics[metric]
            finite = [finite_values(by_round[number]).values() for number in sorted(by_round)]
            if means := [finite_mean(values) if values else math.nan for values in finite]:
                yield metric, means[-1], means[-1] - means[-2] if len(means) > 1 else math.nan


@group()
def run_display(state: RunState) -> Iterator[RenderableType]:
    """The current state; foreign names are text without markup."""
    moment = "finished" if state.finished else "not begun"
    if state.rounds and not state.finished:
        left = "" if state.left is None else f", about {duration(state.left)} left"
        moment = f"round {state.round} of {state.rounds}, {duration(state.elapsed)} elapsed{left}"
    yield _line(f"{state.name or 'polyfed'}: {moment}", "bold")
    if state.rounds:
        yield Padding(ProgressBar(state.rounds, state.round - state.running), 0)  # with an end of line
    if state.running:
        yield _line(state.step_in_words)
    if state.work_in_words:
        yield _line(state.work_in_words, "yellow")
    if state.complete:
        up, down = map(mib, state.bytes)
        last = state.complete[max(state.complete)]
        of_last = f"(last round {mib(last.up)}, {mib(last.down)}); {duration(last.seconds or 0.0)} per round"
        yield _line(f"{up} MiB up, {down} MiB down {of_last}")
    numbers = (Column(name, justify="right", overflow="crop") for name in ("value", "change", "chance"))
    metrics = Table(Column("last", overflow="crop"), *numbers, box=None, pad_edge=False)
    for names, value, change in list(state.latest())[:_MOST_METRICS]:
        shown = "" if math.isnan(change) else f"{change:+.2f}"
        chance = finite_mean(state.chances[names].values())
        guessed = "" if math.isnan(chance) else format_number(chance)
        metrics.add_row(_line(" ".join(names), "cyan"), format_number(value), shown, guessed)
    if metrics.row_count:
        yield metrics
    for incident in list(state.incidents)[-_MOST_INCIDENTS:]:
        yield _line(incident_line(incident), "yellow")


def _line(text: str, style: str = "") -> Text:
    # neither an ellipsis nor a symbol for a control character is ASCII, and a terminal may support nothing else
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return Text(" ".join(shown.split()), style=style, no_wrap=True, overflow="crop")


class LiveProgress(Callback):
    """A live display of the run below its events, replaced by the result at the end.

    Args:
        console: A terminal, or the console of a notebook.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._state = console, RunState()
        self._lock = RLock()  # the display's own thread reads, the run's thread writes
        self._live = Live(console=console, get_renderable=self._display, refresh_per_second=4, vertical_overflow="crop")

    def show(self) -> None:
        """Begin to draw, unless it is drawn already."""
        self._live.start(refresh=True)

    def handle(self, event: Event) -> None:
        """Update the state; print lines above the display."""
        with self._lock:
            self._state.handle(event)
        match event:
            case events.Preparing():
                self.show()
            case events.RunStarted():
                self.show()
                _print_line(self._console, run_line(event))
            case Incident():
                _print_line(self._console, incident_line(event), style="yellow")
            case events.RunComplete(folder):
                self._live.transient = True
                self.close()
                self._console.print(summary_of(folder), crop=False)

    def happened_at(self, when: float) -> None:
        self._state.happened_at(when)

    def close(self) -> None:
        self._live.stop()

    def _display(self) -> Group:
        with self._lock:  # all is text when it is returned, so the state may change while it is printed
            return run_display(self._state)


class WithoutSummary(Callback):
    """A progress display without the result at the end."""

    def __init__(self, display: Callback) -> None:
        self._display = display

    def handle(self, event: Event) -> None:
        if not isinstance(event, events.RunComplete):
            self._display.handle(event)


# ---- lines


class PlainProgress(Callback):
    """Prints one line per round and event, and the current work after ten silent seconds; for log files and pipes."""

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._console, self._now, self._state = console, now, RunState()
        self._metrics: dict[tuple[str, str], Metrics] = {}  # of the round
        self._cohort = 0
        self._part, self._far, self._began, self._due = "", "", now(), math.inf
        self._lock, self._closed = RLock(), Flag()  # long work may be silent: a separate thread reads the clock
        self._watch: Thread | None = None

    def handle(self, event: Event) -> None:
        with self._lock:
            self._state.handle(event)
            self._handle(event)
            if self._watch is None:
                self._watch = Thread(target=self._look_on, daemon=True)
                self._watch.start()

    def close(self) -> None:
        with self._lock:  # so that no line follows
            self._closed.set()

    def _look_on(self) -> None:
        while not self._closed.wait(_LOOK):
            with self._lock:
                if not self._closed.is_set():
                    self.look()

    def look(self) -> None:
        """Print the current work, its progress and its time, if that is due."""
        with self._lock:
            if self._part and self._now() >= self._due:
                number = f"round {self._state.round}/{self._state.rounds}: " if self._state.rounds else ""
                self._print(f"{number}{self._part}{self._far} ... {duration(self._now() - self._began)}")

    def _handle(self, event: Event) -> None:
        match event:
            case events.Preparing(what, done, total):
                self._goes_on(what, done, total)
            case Working(participant, what, done, total):
                self._goes_on(f"{participant}: {what}", done, total)
            case events.ClientStarted(client, step):
                self._goes_on(f"{client}: {step}")
            case events.RunStarted():
                self._print(run_line(event))
            case Incident():
                self._print(incident_line(event))
            case events.RoundStarted(_, cohort):
                self._metrics, self._cohort = {}, len(cohort)
            case events.Measured(_, participant, kind, metrics):
                self._metrics[participant, kind] = metrics
            case events.RoundComplete() if event.seconds is not None:
                self._print("  ".join(self._round_parts(event)))
            case events.RunComplete(folder):
                self._part = ""
                self._console.print(summary_of(folder), crop=False)

    def _goes_on(self, part: str, done: int = 0, total: int = 0) -> None:
        self._far = f": {done:,} of {total:,}" if total else ""
        if part != self._part:
            silent_until = self._now() + (_SILENCE if self._state.rounds else _LONG_PREPARATION)
            self._part, self._began, self._due = part, self._now(), min(self._due, silent_until)

    def _print(self, line: str) -> None:
        self._due = self._now() + _SILENCE
        _print_line(self._console, line)

    def _round_parts(self, complete: events.RoundComplete) -> Iterator[str]:
        yield f"round {complete.round}/{self._state.rounds}"
        yield duration(complete.seconds or 0.0)
        replies = self._cohort if complete.replies is None else complete.replies
        yield f"{replies}/{self._cohort} clients" if self._cohort else "no client is asked"
        yield from (f"{participant}: {text}" for participant, text in brief_metrics(self._metrics).items())
        if self._state.left:
            yield f"{duration(self._state.left)} left"


class FolderLine(Callback):
    """Prints the run folder when the run begins, after all checks.

    Args:
        folder: The run folder.
        console: The console of the display; others would print into it.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console

    def handle(self, event: Event) -> None:
        if isinstance(event, events.RunStarted):
            _print_line(self._console, f"run folder: {self._folder}")


def brief_metrics(latest: Mapping[tuple[str, str], Metrics]) -> dict[str, str]:
    """Main metrics of the server and of all clients together, with their chance; tests, or else validations.

    A mean over clients includes their number if not all measured clients have the metric.

    Args:
        latest: (participant, kind) -> its latest metrics.
    """
    texts: dict[str, str] = {}
    for whose, split in product((SERVER, "clients"), EVALUATIONS):
        on_split = {name: metrics for (name, on), metrics in latest.items() if on == split}
        known = [metrics for name, metrics in on_split.items() if (name == SERVER) == (whose == SERVER)]
        if known and f"{whose} test" not in texts:
            names = quality_names(known)
            main = [name for name in names if name in PREFERRED] or names[:1]
            texts[f"{whose} {split}"] = ", ".join(_brief(name, known) for name in main)
    return texts


def _brief(name: str, measured: Sequence[Metrics]) -> str:
    own = [metrics for metrics in measured if name in metrics]
    scale, chance = scale_of(name, own[0]), common_chance(name, own)
    notes = [f"chance {chance:.2f}"] if math.isfinite(chance) else []
    notes += [f"of {len(own)}"] if len(own) < len(measured) else []
    value = f"{name} {finite_mean(metrics[name] for metrics in own):.2f}{f' of {count(scale)}' if scale > 100 else ''}"
    return f"{value} ({', '.join(notes)})" if notes else value


def run_line(event: events.RunStarted) -> str:
    """Name and size of a run that begins."""
    resumed = f", resumed after round {event.done}" if event.done else ""
    return f"{event.name}: {event.rounds} rounds, {event.clients} clients{resumed}"


def incident_line(incident: Incident) -> str:
    """Incident as a line of a log."""
    return f"round {incident.round}: {incident.title}: {incident.participant}: {incident.reason}"


def summary_of(folder: Path) -> RunSummary:
    return RunSummary(open_run(folder).records)


def _print_line(console: Console, text: str, style: str = "") -> None:
    console.print(plain(text), style=style, markup=False, highlight=False, soft_wrap=True)
