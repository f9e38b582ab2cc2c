"""What a person sees while a run goes on: bars on a terminal, one line a round elsewhere, or nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from polyfed.core.untrusted import plain
from polyfed.reporting.recalls import is_context
from polyfed.reporting.tables import duration
from polyfed.runs.progress import Metrics, Progress
from polyfed.runs.records import SERVER

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LONG = 3.0  # seconds of preparation that a log file is told of
WINDOW = 5  # rounds that the estimate of the remaining time looks back


class PlainProgress(Progress):
    """One line a round and an event, for log files and pipes."""

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._clock = _Clock()
        self._metrics: dict[tuple[str, str], Metrics] = {}
        self._cohort = 0
        self._excluded = 0
        self._prepared, self._until = "", math.inf

    def preparing(self, what: str, done: int, total: int) -> None:
        """Print what is read or computed, once, if it takes long."""
        if what != self._prepared:
            self._prepared, self._until = what, self._now() + _LONG
        elif self._now() > self._until:
            self._until = math.inf
            self._print(f"{what}: {done:,} of {total:,} ..." if total else f"{what} ...")

    def run_started(self, name: str, rounds: int, clients: int, *, done: int = 0) -> None:
        """Print name and size of the run."""
        self._clock = _Clock(rounds, done)
        resumed = f", resumed after round {done}" if done else ""
        self._print(f"{name}: {rounds} rounds, {clients} clients{resumed}")

    def round_started(self, round_number: int, cohort: Sequence[str]) -> None:
        """Forget the round before."""
        self._metrics, self._cohort, self._excluded = {}, len(cohort), 0

    def event(self, round_number: int, participant: str, event: str, reason: str) -> None:
        """Print the event."""
        self._excluded += event == "client_excluded"
        self._print(f"round {round_number}: {event.replace('_', ' ')}: {participant}: {reason}")

    def evaluated(self, round_number: int, participant: str, kind: str, metrics: Metrics) -> None:
        """Keep the metrics for the line of the round."""
        self._metrics[participant, kind] = metrics

    def round_finished(self, round_number: int, seconds: float) -> None:
        """Print the line of the round."""
        self._clock.tick(round_number, seconds)
        answered = f"{self._cohort - self._excluded}/{self._cohort} clients" if self._cohort else "no client is asked"
        parts = [f"round {round_number}/{self._clock.rounds}", duration(seconds), answered]
        parts += [f"{participant}: {text}" for participant, text in summaries(self._metrics).items()]
        left = self._clock.left
        self._print("  ".join(parts + ([f"{duration(left)} left"] if left else [])))

    def run_finished(self, summary: RenderableType) -> None:
        """Print the report."""
        self._console.print(summary)

    def _print(self, text: str) -> None:
        self._console.print(plain(text), markup=False, highlight=False, soft_wrap=True)


def progress_for(console: Console) -> Progress:
    """Bars on a terminal, lines elsewhere."""
    from polyfed.reporting.bars import BarProgress

    return BarProgress(console) if console.is_terminal else PlainProgress(console)


def summaries(latest: Mapping[tuple[str, str], Metrics]) -> dict[str, str]:
    """One short text for the server and each kind of measurement, and one for all clients together.

    Args:
        latest: (participant, kind) -> its latest metrics.
    """
    texts = {
        f"{SERVER} {kind}": _brief(metrics) for (participant, kind), metrics in latest.items() if participant == SERVER
    }
    for kind in dict.fromkeys(kind for participant, kind in latest if participant != SERVER):
        measured = [metrics for (participant, k), metrics in latest.items() if participant != SERVER and k == kind]
        names = dict.fromkeys(name for metrics in measured for name in metrics)
        found = {name: [metrics[name] for metrics in measured if name in metrics] for name in names}
        means = {name: fmean(values) for name, values in found.items()}
        some = {name: f" (of {len(values)})" for name, values in found.items() if len(values) < len(measured)}
        texts[f"mean of {len(measured)} clients {kind}"] = _brief(means, some)
    return texts


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
