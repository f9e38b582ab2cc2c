"""Live progress of a study: cells done, what runs, and how long it takes."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from polyfed.lab.studies.runner import Progress
from polyfed.reporting.tables import duration


class StudyDisplay:
    """A bar of all cells with those that run beside it; without a terminal, a line whenever a cell is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Bars(
            TextColumn("cells"),
            BarColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._bars.add_task("cells", total=None, text="")
        self._told = -1

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
        text = " | ".join(_parts(progress))
        if self._console.is_terminal:
            total = progress.done + progress.failed + progress.left
            self._bars.update(self._task, total=total, completed=progress.done + progress.failed, text=text)
        elif progress.done + progress.failed != self._told:
            self._told = progress.done + progress.failed
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _parts(progress: Progress) -> list[str]:
    total = progress.done + progress.failed + progress.left
    parts = [f"{progress.done}/{total}" + (f", {progress.failed} failed" if progress.failed else "")]
    parts += [f"{label} ({done}/{rounds})" for label, (done, rounds) in progress.running.items()]
    return [*parts, *([] if progress.seconds_left is None else [f"{duration(progress.seconds_left)} left"])]
