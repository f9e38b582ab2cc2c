"""Live progress of a study: cells done, what runs, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape

from polyfed.lab.studies.runner import Progress
from polyfed.reporting.tables import duration

_EVERY = 10.0  # seconds between two lines where no cell is done


class StudyDisplay:
    """How many cells are done, and which run; without a terminal a line when one is done, or ten seconds later."""

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._console, self._now = console, now
        self._status = console.status("")
        self._told, self._began, self._when = -1, now(), now()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._status.stop()

    def __call__(self, progress: Progress) -> None:
        """Show it."""
        text = " | ".join([*_parts(progress), f"{duration(self._now() - self._began)} so far"])
        if self._console.is_terminal:
            self._status.update(escape(f"cells {text}"))
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
    parts += [f"{label} ({what})" if what else label for label, what in progress.running.items()]
    return [*parts, *([] if progress.seconds_left is None else [f"{duration(progress.seconds_left)} left"])]
