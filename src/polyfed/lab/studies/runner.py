"""Runs a study: cells in parallel, row by row, until all are done or the budget is spent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.markup import escape

from polyfed.core.errors import ConfigError, RunError, nearest
from polyfed.lab.studies.cells import Cell, Chosen, Places, SearchIncompleteError, StudyPlan, cell_label, require_data
from polyfed.lab.studies.claims import ALL, Judgement
from polyfed.lab.studies.column import ColumnSettings
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Point, Study, point_label
from polyfed.lab.studies.workers import CellOutcome, Order, Workers, is_done
from polyfed.reporting.tables import duration

_POLL = 0.5  # seconds between two looks at the display and the budget
_Place = tuple[str, Point, int]  # row, point and seed
_Key = tuple[int, int]  # number of the row at its point, and whether it is a search


@dataclass(frozen=True)
class Progress:
    """Progress of a study.

    Attributes:
        done, failed, left: Numbers of cells.
        running: Label of a cell -> its current preparation; empty while it trains.
        seconds_left: Expected remaining seconds; None before the first cell is done.
    """

    done: int
    failed: int
    left: int
    running: Mapping[str, str]
    seconds_left: float | None


@dataclass(frozen=True)
class Ended:
    """End of an invocation.

    Attributes:
        failures: Label of a cell -> cause.
        missing: Labels of cells that were not run.
        stopped: Reason why no further cells were begun; empty if all were.
    """

    failures: Mapping[str, str]
    missing: tuple[str, ...]
    stopped: str = ""


OnProgress = Callable[[Progress], None]
OnFailures = Callable[[Mapping[str, str]], Results]


@dataclass
class Runner:
    """One invocation.

    Attributes:
        plan: Plan of the study.
        jobs: Parallel cells.
        gpus: Number of GPUs.
        budget: Seconds; None for no limit.
        only: Rows to run; None for all.
        listener: Receives progress now and then.
        saver: Saves and returns the results, given label of a failed cell -> cause, whenever a cell has ended.
        recorded: Labels of cells whose figures are recorded.
    """

    plan: StudyPlan
    jobs: int
    gpus: int = 0
    budget: float | None = None
    only: Sequence[str] | None = None
    listener: OnProgress = lambda progress: None
    saver: OnFailures | None = None
    recorded: Collection[str] = ()
    _due: dict[str, tuple[_Key, Cell]] = field(default_factory=dict)
    _cells: dict[str, Cell] = field(default_factory=dict)
    _waiting: list[_Place] = field(default_factory=list)
    _order: dict[tuple[str, Point], int] = field(default_factory=dict)
    _wanted: dict[str, dict[str, ColumnSettings]] = field(default_factory=dict)  # columns by digest, by cell
    _running: set[str] = field(default_factory=set)
    _second: set[str] = field(default_factory=set)  # claims with a second look
    _failures: dict[str, str] = field(default_factory=dict)
    _seconds: list[float] = field(default_factory=list)
    _done: set[str] = field(default_factory=set)
    _stopped: str = ""

    def prepare(self) -> None:
        """Resolve every row, and check the data of the rows to run.

        Raises:
            ConfigError: The settings of a row are wrong.
            DataError: The folder of a source is missing.
        """
        experiments = {place: self.plan.check(*place) for place in self.plan.row_points()}
        self.plan.check_tuning(experiments)
        self._order = {place: number for number, place in enumerate(self.plan.row_points(self.only))}
        for place in self._order:
            require_data(experiments[place])
        self._waiting = self._unrecorded((*place, seed) for place in self._order for seed in self.plan.study.seeds)

    def run(self) -> Ended:
        """Run missing cells, after ``prepare``."""
        self._advance()
        self._save()
        begun = time.monotonic()
        with contextlib.closing(Workers(self.jobs, self.gpus)) as workers:
            while workers.running or (self._due and not self._stopped):
                if not self._stopped and self.budget is not None and time.monotonic() - begun > self.budget:
                    self._stopped = "the budget is spent; the same command goes on"
                    break
                while self._due and len(workers.running) < self.jobs and not self._stopped:
                    self._start(workers)
                if outcomes := workers.wait(_POLL):
                    for outcome in outcomes:
                        self._take(outcome)
                    self._save()
                running = {self._cells[key].label: workers.activities.get(key, "") for key in workers.running}
                left = len(self._due) + len(running) + len(self._waiting)
                seconds_left = fmean(self._seconds) * left / self.jobs if self._seconds else None
                self.listener(Progress(len(self._done), len(self._failures), left, running, seconds_left))
        not_done = [cell.label for key, cell in self._cells.items() if key not in self._done]
        missing = tuple(
            label
            for label in (*not_done, *(cell_label(*place) for place in self._waiting))
            if label not in self._failures
        )
        return Ended(self._failures, missing, self._stopped)

    def _save(self) -> None:
        """Save results, and plan the second look if a judged claim is undecided."""
        if self.saver is None:
            return
        results, study = self.saver(self._failures), self.plan.study
        undecided = [one for one in results.judgements() if one.verdict == "undecided"] if study.more_seeds else []
        for item in undecided:
            known = {*item.sample.seeds} if item.sample else set[int]()
            if known >= {*study.seeds} and item.claim.text not in self._second:
                self._second.add(item.claim.text)
                self._waiting += [place for place in self._later(item) if place not in self._waiting]
                self._advance()

    def _later(self, item: Judgement) -> list[_Place]:
        """Rows of a claim with the seeds of the second look."""
        read = {(operand.row, operand.label) for operand in item.claim.operands}
        row_points = [(row, at) for row, at in self._order if {(row, ""), (row, ALL), (row, point_label(at))} & read]
        return self._unrecorded((*place, seed) for place in row_points for seed in self.plan.study.more_seeds)

    def _unrecorded(self, runs: Iterable[_Place]) -> list[_Place]:
        return [place for place in runs if cell_label(*place) not in self.recorded]

    def _advance(self) -> None:
        """Plan searches, and the cells of seeds whose search is complete."""
        still = []
        for place in self._waiting:
            number = self._order[place[:2]]
            try:
                self._add(self.plan.cell(*place), (number, 0))
            except SearchIncompleteError:
                still.append(place)
                for cell in self.plan.search(*place):
                    self._add(cell, (number, 1))
            except RunError as error:  # no candidate has a figure
                self._failures[cell_label(*place)] = str(error)
        self._waiting = still

    def _add(self, cell: Cell, key: _Key) -> None:
        """Plan a cell, or add columns to one that is planned already, by another row or as a candidate."""
        digest, columns = cell.digest, {one.digest: one for one in self.plan.columns(cell)}
        known, wanted = self._cells.get(digest), self._wanted.setdefault(digest, {})
        if known and columns.keys() <= wanted.keys():
            return
        wanted |= columns
        self._cells[digest] = cell if known is None or known.purpose else known
        if digest not in self._running:
            self._check(digest, key)

    def _check(self, digest: str, key: _Key) -> None:
        """Mark a cell as done or due."""
        cell = self._cells[digest]
        self._done.discard(digest)
        try:
            if is_done(cell.folder(self.plan.store), [*self._wanted[digest].values()], self.plan.kept(cell)):
                self._done.add(digest)
            else:
                self._due[digest] = key, cell
        except RunError as error:
            self._failures[cell.label] = str(error)

    def _start(self, workers: Workers) -> None:
        digest = min(self._due, key=lambda name: self._due[name][0])
        _, cell = self._due.pop(digest)
        plan, columns = self.plan, [*self._wanted[digest].values()]
        folder, kept = cell.folder(plan.store), plan.kept(cell)
        workers.start(digest, Order(cell.experiment, folder, columns, plan.places, kept, cell.sources))
        self._running.add(digest)

    def _take(self, outcome: CellOutcome) -> None:
        cell = self._cells[outcome.key]
        self._running.discard(outcome.key)
        if outcome.ending == "done":
            self._check(outcome.key, (0, 0))
            self._seconds.append(outcome.seconds)
            self._advance()
        elif outcome.ending == "no space":
            self._stopped = f"{outcome.cause}; free some, then give the same command"
        else:
            self._failures[cell.label] = f"{outcome.cause} (cells/{cell.digest}.log)"
            self.plan.failed.add(cell.digest)  # a search goes on without it
            self._advance()


CELLS = "cells"
"""Folder of all cells, next to the folders of the studies that share them."""


@dataclass(frozen=True)
class StudyRun:
    """Outcome of one invocation of a study: results so far, and missing cells.

    Attributes:
        results: Results so far.
        ended: Missing cells, with reasons.
        folder: Folder of the study.
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
    known: Mapping[tuple[str, Point, int], Chosen] | None = None,
    recorded: Results | None = None,
    on_results: Callable[[Results], None] = lambda results: None,
) -> StudyRun:
    """Run the missing cells, and write the results of the study.

    Args:
        study: The study.
        out: Its folder; cells are in the folder ``cells`` next to it, shared with the other studies there.
        places: Folders of data and weights, and the engine.
        only: Rows to run; None for all.
        jobs: Parallel cells; None for one per GPU, else one per core.
        budget: Seconds; None for no limit.
        listener: Receives progress.
        known: (row, point, seed) -> earlier choice, in place of a search.
        recorded: Figures of cells that need not run.
        on_results: Receives the results whenever a cell has ended.

    Raises:
        ConfigError: A setting of a row is wrong (before any cell begins), or a row is unknown.
        DataError: The data of a row are missing (likewise).
        RunError: Another process works on the study.
    """
    import torch

    for row in only or ():
        if row not in study.rows:
            raise ConfigError(f"--only {row}: no such row; {nearest(row, study.rows)}")
    plan = StudyPlan(study, places or Places(), out.parent / CELLS, known or {})

    def save(failures: Mapping[str, str]) -> Results:
        now = Results.gather(plan, failures, recorded.cells if recorded else ())
        results = recorded.merged(now) if recorded else now
        results.save(out)  # for readers while it runs
        on_results(results)
        return results

    gpus = torch.cuda.device_count()
    # of each cell's threads there is one
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    runner = Runner(plan, jobs or gpus or cores, gpus, budget, only, listener, save, recorded.cells if recorded else ())
    runner.prepare()
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        ended = runner.run()
    return StudyRun(Results.load(out), ended, out)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock of the study, as two invocations would run the same cells."""
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process works on the study in '{folder}'; wait, or choose another --out") from None
        yield


_EVERY = 10.0  # seconds between two lines while no cell is done


@contextlib.contextmanager
def study_display(console: Console, now: Callable[[], float] = time.monotonic) -> Iterator[OnProgress]:
    """Display of done and running cells; without a terminal a line when one is done, or after ten seconds."""
    began, shown, when = now(), -1, now()

    def show(progress: Progress) -> None:
        nonlocal shown, when
        text = " | ".join([*_parts(progress), f"{duration(now() - began)} so far"])
        ended = progress.done + progress.failed
        if console.is_terminal:
            status.update(escape(f"cells {text}"))
        elif ended != shown or now() - when >= _EVERY:
            shown, when = ended, now()
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    with console.status("") as status:  # silent without a terminal
        yield show


def _parts(progress: Progress) -> list[str]:
    total = progress.done + progress.failed + progress.left
    parts = [f"{progress.done}/{total}" + (f", {progress.failed} failed" if progress.failed else "")]
    parts += [f"{label} ({what})" if what else label for label, what in progress.running.items()]
    return [*parts, *([] if progress.seconds_left is None else [f"{duration(progress.seconds_left)} left"])]
