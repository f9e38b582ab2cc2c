"""Progress on a terminal: a bar of the rounds, one of the clients, who is at work on what, and the latest metrics."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from typing import TYPE_CHECKING

from polyfed.core.untrusted import plain
from polyfed.reporting.outcome import outcome_of
from polyfed.reporting.progress import incident_line, started_line, summaries
from polyfed.reporting.run_state import RunState
from polyfed.reporting.wording import PREPARING, doing, ticking
from polyfed.runs.events import Callback, Event, Incident, Measured, Metrics, Preparing, RunComplete, RunStarted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress_bar import ProgressBar

_LONGEST_BAR = 30  # columns


class BarProgress(Callback):
    """Bars that move within rounds and steps, below the events; at the end they make room for the result.

    Args:
        console: a terminal.
    """

    def __init__(self, console: Console) -> None:
        from rich.live import Live
        from rich.spinner import Spinner

        self.state = RunState()
        self._console = console
        self._metrics: dict[tuple[str, str], Metrics] = {}
        self._lock = RLock()  # the display's own thread reads, the run's thread writes
        self._spinner = Spinner("line" if console.options.ascii_only else "dots")
        self._live = Live(console=console, get_renderable=self._picture, refresh_per_second=5)

    def handle(self, event: Event) -> None:
        """Enter the event; print what stays above the bars."""
        with self._lock:
            self.state.handle(event)
            if isinstance(event, Measured) and event.kind != "train":
                self._metrics[event.participant, event.kind] = event.metrics
        if isinstance(event, Preparing | RunStarted) and not self._live.is_started:
            self._live.start()
        if isinstance(event, RunStarted):
            self._print(started_line(event))
        elif isinstance(event, Incident):
            self._print(incident_line(event), style="yellow")
        elif isinstance(event, RunComplete):
            self._live.transient = True
            self.close()
            self._console.print(outcome_of(event.folder))

    def happened_at(self, when: float) -> None:
        """Times of what happens next count from then."""
        self.state.happened_at(when)

    def close(self) -> None:
        """Give the terminal back."""
        self._live.stop()

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(plain(text), style=style, markup=False, highlight=False)

    # ---- the picture

    def _picture(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        with self._lock:
            metrics = Table.grid(padding=(0, 2))
            for participant, text in summaries(dict(self._metrics)).items():
                metrics.add_row(self._text(participant, "bold"), self._text(text))
            lines = Table.grid(padding=(0, 1))
            for column in (self._label_width, self._bar_width):
                lines.add_column(width=column, no_wrap=True)
            for row in self._rows():
                lines.add_row(*row)
        return Group(metrics, lines) if self._metrics else lines

    @property
    def _label_width(self) -> int:
        names = [*self.state.clients, PREPARING]
        return min(2 + max(map(len, names)), max(11, self._console.width // 4))

    @property
    def _bar_width(self) -> int:
        return max(4, min(_LONGEST_BAR, self._console.width - self._label_width - 44))

    def _rows(self) -> list[Sequence[RenderableType]]:
        state = self.state
        rows: list[Sequence[RenderableType]] = []
        if state.rounds:
            left = "" if state.left is None else f", about {ticking(max(1.0, state.left))} left"
            count = f"{state.rounds_done}/{state.rounds}"
            rows.append(self._row("rounds", state.share, count, f"{ticking(state.elapsed)}{left}"))
        if state.running and state.step:
            done = sum(client.status == "done" for client in state.clients.values())
            share = state.step_share / max(1, len(state.clients))
            rows.append(self._row("clients", share, f"{done}/{len(state.clients)}", state.step))
        activity = doing(state)
        if activity is not None:
            label = self._label(activity.who)
            rows.append(self._row(label, activity.share, activity.count, activity.words))
        return rows

    def _label(self, who: str) -> RenderableType:
        from rich.table import Table

        label = Table.grid(padding=(0, 1))
        label.add_row(self._spinner, self._text(who))
        return label

    def _row(
        self, label: RenderableType, share: float | None, count: str, words: str
    ) -> tuple[RenderableType, RenderableType, RenderableType]:
        left = f"{count}  " if count else ""
        return label, "" if share is None else self._bar(share), self._text(f"{left}{words}")

    def _bar(self, share: float) -> ProgressBar:
        from rich.progress_bar import ProgressBar

        return ProgressBar(total=1.0, completed=share, width=self._bar_width)

    def _text(self, content: str, style: str = "") -> RenderableType:
        from rich.text import Text

        return Text(
            content, style=style, no_wrap=True, overflow="crop" if self._console.options.ascii_only else "ellipsis"
        )
