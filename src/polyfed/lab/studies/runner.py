"""Running a study: its cells side by side, those that matter most first, until all are done or the budget is spent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.markup import escape

from polyfed.core.errors import ConfigError, RunError, nearest
from polyfed.lab.studies.cells import Cell, Places, StudyPlan, require_data
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Point, Study
from polyfed.lab.studies.workers import CellOutcome, Order, Workers, is_done
from polyfed.reporting.tables import duration

_POLL = 0.5  # seconds between two looks at the display and the budget
_Key = tuple[int, int, int]  # what comes first: main rows, then first seeds, then the order of rows


@dataclass(frozen=True)
class Progress:
    """Where a study is.

    Attributes:
        done, failed, left: cells.
        running: label of a cell -> what it prepares; empty while it trains.
        seconds_left: expected; None before the first cell is done.
    """

    done: int
    failed: int
    left: int
    running: Mapping[str, str]
    seconds_left: float | None


@dataclass(frozen=True)
class Ended:
    """How an invocation ended.

    Attributes:
        failures: label of a cell -> cause.
        missing: labels of cells that were not run.
        stopped: why no further cells were begun; empty if all were.
    """

    failures: Mapping[str, str]
    missing: tuple[str, ...]
    stopped: str = ""


OnProgress = Callable[[Progress], None]
OnFailures = Callable[[Mapping[str, str]], None]


@dataclass
class Runner:
    """One invocation.

    Attributes:
        plan: of the study.
        jobs: cells at once.
        gpus: to deal out.
        budget: seconds; None: no limit.
        only: the rows that are run; None: all.
        listener: is told of progress now and then.
        saver: is given label of a failed cell -> cause, at the start and whenever a cell has ended.
    """

    plan: StudyPlan
    jobs: int
    gpus: int = 0
    budget: float | None = None
    only: Sequence[str] | None = None
    listener: OnProgress = lambda progress: None
    saver: OnFailures = lambda failures: None
    _due: dict[str, tuple[_Key, Cell]] = field(default_factory=dict)
    _cells: dict[str, Cell] = field(default_factory=dict)
    _waiting: list[tuple[str, Point]] = field(default_factory=list)
    _failures: dict[str, str] = field(default_factory=dict)
    _seconds: list[float] = field(default_factory=list)
    _done: set[str] = field(default_factory=set)
    _stopped: str = ""

    def prepare(self) -> None:
        """Resolve every row, and look for the data of those that are run.

        Raises:
            ConfigError: the settings of a row are wrong.
            DataError: the folder of a source is not there.
        """
        experiments = {place: self.plan.check(*place) for place in self.plan.row_points()}
        self.plan.check_tuning(experiments)
        self._waiting = self.plan.row_points(self.only)
        for place in self._waiting:
            require_data(experiments[place])

    def run(self) -> Ended:
        """Run what is missing, after ``prepare``."""
        self._advance()
        self.saver(self._failures)
        begun = time.monotonic()
        with contextlib.closing(Workers(self.jobs, self.gpus)) as workers:
            while workers.running or (self._due and not self._stopped):
                if not self._stopped and self.budget is not None and time.monotonic() - begun > self.budget:
                    self._stopped = "the budget is spent; the same command goes on"
                    break
                while self._due and workers.is_free and not self._stopped:
                    self._start(workers)
                if outcomes := workers.wait(_POLL):
                    for outcome in outcomes:
                        self._take(outcome)
                    self.saver(self._failures)
                running = {self._cells[key].label: workers.activity(key) for key in workers.running}
                left = len(self._due) + len(running) + len(self._waiting) * len(self.plan.study.seeds)
                seconds_left = fmean(self._seconds) * left / self.jobs if self._seconds else None
                self.listener(Progress(len(self._done), len(self._failures), left, running, seconds_left))
        not_done = [cell.label for key, cell in self._cells.items() if key not in self._done]
        waiting = [f"{', '.join((row, *point))}: all seeds" for row, point in self._waiting]
        missing = tuple(label for label in (*not_done, *waiting) if label not in self._failures)
        return Ended(self._failures, missing, self._stopped)

    def _advance(self) -> None:
        """Plan what can be: searches, and the final cells of rows whose search is complete."""
        still = []
        for number, (row, point) in enumerate(self._waiting):
            try:
                for place, cell in enumerate(self.plan.final(row, point)):
                    self._add(cell, place, number)
            except LookupError:
                still.append((row, point))
                for cell in self.plan.search(row, point):
                    self._add(cell, -1, number)
            except RunError as error:  # no candidate has a figure
                self._failures[", ".join((row, *point))] = str(error)
        self._waiting = still

    def _add(self, cell: Cell, place: int, number: int) -> None:
        key = cell.digest
        if key in self._cells:
            return  # shared: of another row, or planned before
        self._cells[key] = cell
        try:
            if is_done(cell.folder(self.plan.store), self.plan.columns(cell), self.plan.kept(cell)):
                self._done.add(key)
                return
        except RunError as error:
            self._failures[cell.label] = str(error)
            return
        is_extra = not self.plan.study.resolved(cell.row).main
        self._due[key] = (is_extra, place, number), cell

    def _start(self, workers: Workers) -> None:
        key = min(self._due, key=lambda name: self._due[name][0])
        _, cell = self._due.pop(key)
        plan = self.plan
        columns, kept = plan.columns(cell), plan.kept(cell)
        order = Order(cell.experiment, cell.folder(plan.store), columns, plan.places, kept, cell.sources)
        workers.start(key, order)

    def _take(self, outcome: CellOutcome) -> None:
        cell = self._cells[outcome.key]
        if outcome.ending == "done":
            self._done.add(outcome.key)
            self._seconds.append(outcome.seconds)
            self._advance()
        elif outcome.ending == "no space":
            self._stopped = f"{outcome.cause}; free some, then give the same command"
        else:
            self._failures[cell.label] = f"{outcome.cause} (cells/{cell.digest}.log)"
            if cell.purpose:
                self.plan.failed.add(cell.digest)
                self._advance()


CELLS = "cells"
"""Folder of all cells, beside the folders of the studies that share them."""


@dataclass(frozen=True)
class StudyRun:
    """A study after an invocation.

    Attributes:
        results: all that is known.
        ended: what is missing, and why.
        folder: where it is kept.
    """

    results: Results
    ended: Ended
    folder: Path


def run_study(
    study: Study,
    out: Path,
    *,
    places: Places | None = None,
    only: Sequence[str] | None = None,
    jobs: int | None = None,
    budget: float | None = None,
    listener: OnProgress = lambda progress: None,
) -> StudyRun:
    """Run the cells that are missing, and write what is known of the study.

    Args:
        study: what is run.
        out: its folder; its cells are in the folder ``cells`` beside it, shared with the other studies there.
        places: of data and weights, and the engine.
        only: rows that are run; None: all.
        jobs: cells at once; None: one a GPU, else one a core.
        budget: seconds; None: no limit.
        listener: is told of progress.

    Raises:
        ConfigError: a setting of a row is wrong (found before any cell begins), or there is no such row.
        DataError: the data of a row are not there (likewise).
        RunError: another process works on the study.
    """
    import torch

    for row in only or ():
        if row not in study.rows:
            raise ConfigError(f"--only {row}: no such row; {nearest(row, study.rows)}")
    plan = StudyPlan(study, places or Places(), out.parent / CELLS)

    def save(failures: Mapping[str, str]) -> None:
        Results.gather(plan, failures).save(out)  # whoever looks while it runs sees what is there

    gpus = torch.cuda.device_count()
    # of each cell's threads there is one
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    runner = Runner(plan, jobs or gpus or cores, gpus, budget, only, listener, save)
    runner.prepare()
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        ended = runner.run()
    return StudyRun(Results.load(out), ended, out)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two invocations would run the same cells."""
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another process works on the study in '{folder}'; wait for it, or choose another --out"
            ) from None
        yield


_EVERY = 10.0  # seconds between two lines where no cell is done


@contextlib.contextmanager
def study_display(console: Console, now: Callable[[], float] = time.monotonic) -> Iterator[OnProgress]:
    """How many cells are done, and which run; without a terminal a line when one is done, or ten seconds later."""
    began, told, when = now(), -1, now()

    def show(progress: Progress) -> None:
        nonlocal told, when
        text = " | ".join([*_parts(progress), f"{duration(now() - began)} so far"])
        ended = progress.done + progress.failed
        if console.is_terminal:
            status.update(escape(f"cells {text}"))
        elif ended != told or now() - when >= _EVERY:
            told, when = ended, now()
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    with console.status("") as status:  # nothing without a terminal
        yield show


def _parts(progress: Progress) -> list[str]:
    total = progress.done + progress.failed + progress.left
    parts = [f"{progress.done}/{total}" + (f", {progress.failed} failed" if progress.failed else "")]
    parts += [f"{label} ({what})" if what else label for label, what in progress.running.items()]
    return [*parts, *([] if progress.seconds_left is None else [f"{duration(progress.seconds_left)} left"])]
