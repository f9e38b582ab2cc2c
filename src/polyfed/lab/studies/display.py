"""Live progress of a study: cells done, what runs, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from polyfed.lab.studies.runner import Progress
from polyfed.reporting.tables import duration

_EVERY = 10.0  # seconds between two lines where no cell is done


class StudyDisplay:
    """A bar of all cells with those that run beside it.

    Without a terminal: a line whenever a cell is done, and else every ten seconds.
    """

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._console, self._now = console, now
        self._bars = Bars(
            TextColumn("cells"),
            BarColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._bars.add_task("cells", total=None, text="")
        self._told, self._began, self._when = -1, now(), now()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        """Show it."""
        text = " | ".join([*_parts(progress), f"{duration(self._now() - self._began)} so far"])
        if self._console.is_terminal:
            total = progress.done + progress.failed + progress.left
            self._bars.update(self._task, total=total, completed=progress.done + progress.failed, text=text)
        elif self._is_news(progress):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _is_news(self, progress: Progress) -> bool:
        told, is_late = progress.done + progress.failed, self._now() - self._when >= _EVERY
        if told == self._told and not is_late:
            return False
        self._told, self._when = told, self._now()
        return True


def _parts(progress: Progress) -> list[str]:
    total = progress.done + progress.failed + progress.left
    parts = [f"{progress.done}/{total}" + (f", {progress.failed} failed" if progress.failed else "")]
    parts += [f"{label} ({cell.activity or f'{cell.done}/{cell.rounds}'})" for label, cell in progress.running.items()]
    return [*parts, *([] if progress.seconds_left is None else [f"{duration(progress.seconds_left)} left"])]
