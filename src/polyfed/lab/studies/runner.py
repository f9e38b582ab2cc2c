"""Running a study: its cells side by side, row by row, until all are done or the budget is spent."""

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
OnFailures = Callable[[Mapping[str, str]], Results]


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
        saver: Saves and returns what is known, given label of a failed cell -> cause, whenever a cell has ended.
        recorded: Labels of cells whose figures are known without them.
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
        """Resolve every row, and look for the data of those that are run.

        Raises:
            ConfigError: the settings of a row are wrong.
            DataError: the folder of a source is not there.
        """
        experiments = {place: self.plan.check(*place) for place in self.plan.row_points()}
        self.plan.check_tuning(experiments)
        self._order = {place: number for number, place in enumerate(self.plan.row_points(self.only))}
        for place in self._order:
            require_data(experiments[place])
        self._waiting = self._unrecorded((*place, seed) for place in self._order for seed in self.plan.study.seeds)

    def run(self) -> Ended:
        """Run what is missing, after ``prepare``."""
        self._advance()
        self._save()
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
                    self._save()
                running = {self._cells[key].label: workers.activity(key) for key in workers.running}
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
        """Save what is known, and plan the second look where that leaves a judged claim undecided."""
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
        places = [(row, at) for row, at in self._order if {(row, ""), (row, ALL), (row, point_label(at))} & read]
        return self._unrecorded((*place, seed) for place in places for seed in self.plan.study.more_seeds)

    def _unrecorded(self, places: Iterable[_Place]) -> list[_Place]:
        return [place for place in places if cell_label(*place) not in self.recorded]

    def _advance(self) -> None:
        """Plan what can be: searches, and the cells of those seeds whose search is complete."""
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
        """Plan a cell; one that is planned already, by another row or as a candidate, has all columns asked of it."""
        digest, columns = cell.digest, {one.digest: one for one in self.plan.columns(cell)}
        known, wanted = self._cells.get(digest), self._wanted.setdefault(digest, {})
        if known and columns.keys() <= wanted.keys():
            return
        wanted |= columns
        self._cells[digest] = cell if known is None or known.purpose else known
        if digest not in self._running:
            self._check(digest, key)

    def _check(self, digest: str, key: _Key) -> None:
        """Count a cell as done, or as due."""
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
    known: Mapping[tuple[str, Point, int], Chosen] | None = None,
    recorded: Results | None = None,
    on_results: Callable[[Results], None] = lambda results: None,
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
        known: (row, point, seed) -> what was chosen before, in place of a search.
        recorded: Figures of cells that need not run, as they are known from before.
        on_results: Receives what is known whenever a cell has ended.

    Raises:
        ConfigError: a setting of a row is wrong (found before any cell begins), or there is no such row.
        DataError: the data of a row are not there (likewise).
        RunError: another process works on the study.
    """
    import torch

    for row in only or ():
        if row not in study.rows:
            raise ConfigError(f"--only {row}: no such row; {nearest(row, study.rows)}")
    plan = StudyPlan(study, places or Places(), out.parent / CELLS, known or {})

    def save(failures: Mapping[str, str]) -> Results:
        now = Results.gather(plan, failures, recorded.cells if recorded else ())
        results = recorded.merged(now) if recorded else now
        results.save(out)  # whoever looks while it runs sees what is there
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
    """Two invocations would run the same cells."""
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process works on the study in '{folder}'; wait, or choose another --out") from None
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
