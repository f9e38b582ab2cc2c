"""Parallel cells, a process each: the run or its remainder, then its figures; other files are deleted."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import shutil
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Literal

from polyfed.core.activity import heard_by, preparing
from polyfed.core.declarations import own_code
from polyfed.core.device import cpu_threads
from polyfed.core.errors import PolyfedError, RunError
from polyfed.core.untrusted import file_json
from polyfed.lab.studies.cells import MODELS, RECORDS, CellFigures, Places
from polyfed.lab.studies.column import ColumnSettings
from polyfed.reporting.api import resume, run
from polyfed.runs.events import Callback, Callbacks, Event, Preparing
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.opened import Run, open_run

_OF_MODELS = ("models", "vocabulary", "checkpoints", "arrays")


@dataclass(frozen=True)
class Order:
    """A cell to run.

    Attributes:
        experiment: Its experiment, resolved.
        folder: Its folder.
        columns: Columns to measure.
        places: Folders of data and weights.
        keep: Parts that stay, see ``Study.keep``.
        sources: Digests of components from outside polyfed, which are part of the folder's name.
    """

    experiment: Experiment
    folder: Path
    columns: Sequence[ColumnSettings]
    places: Places
    keep: str
    sources: Mapping[str, Mapping[str, str]]


def is_done(folder: Path, columns: Sequence[ColumnSettings], keep: str) -> bool:
    """True if a cell is complete.

    Raises:
        RunError: Its configuration was edited, or its figures are damaged.
    """
    known = CellFigures.of(folder)
    if known is None or _due(columns, known) or (keep == MODELS and not _has_models(folder)):
        return False
    return not any(_superfluous(folder, known.keep))


def _due(columns: Sequence[ColumnSettings], figures: CellFigures) -> list[ColumnSettings]:
    """Columns that were not measured; one that cannot be measured stays so until its cell is deleted."""
    return [column for column in columns if column.digest not in figures.values]


def execute(order: Order, callbacks: Sequence[Callback] = ()) -> None:
    """Run or continue the cell, and measure missing columns; a complete cell does not change.

    ``callbacks`` follow the run.

    Raises:
        PolyfedError, OSError: The run cannot be completed.
    """
    if (known := _usable(order)) is None:
        if own_code(order.experiment) != order.sources:
            raise RunError("its code was edited since the study began; the same command runs the current code")
        if RunFolder(order.folder).has_begun():
            resume(order.folder, callbacks, quiet=True)
        else:
            run(order.experiment, order.folder, callbacks, quiet=True)
    values, kept = ({}, RECORDS) if known is None else (known.values, known.keep)
    keep = MODELS if MODELS in (order.keep, kept) else RECORDS  # another study may need them
    opened = open_run(order.folder, data_dir=order.places.data_dir, weights_dir=order.places.weights_dir)
    with cpu_threads(order.experiment.run.threads):  # probes and analyses, as the run itself
        measured = {column.digest: _measured(column, opened) for column in _due(order.columns, CellFigures(values))}
    replies = len(opened.records.clipped()), len(opened.records.excluded())
    made = file_json((order.folder / "environment.json").read_bytes())
    code = " ".join(filter(None, [made["versions"]["polyfed"], made["git"]]))
    CellFigures({**values, **measured}, code, keep, replies).save(order.folder)
    # after the figures are safe: a kill before them still finds checkpoints
    for path in _superfluous(order.folder, keep):
        shutil.rmtree(path)


def _usable(order: Order) -> CellFigures | None:
    """The figures of a complete cell; None if it must run again for models that were not kept."""
    known = CellFigures.of(order.folder)
    if known is None or _has_models(order.folder):
        return known
    if order.keep == RECORDS and all(column.is_at_hand(order.folder) for column in _due(order.columns, known)):
        return known
    shutil.rmtree(order.folder)
    return None


def _has_models(folder: Path) -> bool:
    return any((folder / name).is_dir() for name in ("models", "checkpoints"))


def _measured(column: ColumnSettings, run: Run) -> float | str:
    preparing(f"measuring {column.component_name()}")  # a probe or an analysis may take minutes
    try:
        return column.measure(run)
    except PolyfedError as error:
        return str(error)


def _superfluous(folder: Path, keep: str) -> Iterator[Path]:
    """Folders to delete: a study of hundreds of cells would fill a disk."""
    for name in _OF_MODELS if keep == RECORDS else ():
        if (folder / name).is_dir():
            yield folder / name


_LOG = ".log"
_AT_WORK = "at work"
_EVERY = 0.5  # seconds between two texts of a cell
# imports of nearly every cell: they take seconds, once per invocation instead of once per cell
_PRELOADED = [
    "polyfed.lab.studies.workers",
    "polyfed.algorithms.creamfl",
    "pandas",
    "pyarrow",
    "transformers.models.resnet.modeling_resnet",
    "transformers.models.vit.modeling_vit",
    "transformers.models.bert.modeling_bert",
]

Ending = Literal["done", "failed", "no space"]


@dataclass(frozen=True)
class CellOutcome:
    """End of a cell.

    Attributes:
        key: Key of the cell.
        ending: ``done``, ``failed``, or ``no space`` on the disk.
        cause: Cause of a failure, one line.
        seconds: Wall time.
    """

    key: str
    ending: Ending
    cause: str = ""
    seconds: float = 0.0


@dataclass
class Workers:
    """Up to ``jobs`` processes.

    Attributes:
        jobs: Most processes.
        gpus: Number of GPUs, assigned in turn.
        activities: Cell -> its preparation, such as ``encoding cifar100: 3,200 of 24,000``; empty while it trains.
    """

    jobs: int
    gpus: int = 0
    activities: dict[str, str] = field(default_factory=dict)
    _running: dict[str, tuple[ForkServerProcess, Connection, float, int]] = field(default_factory=dict)

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._running)

    def start(self, key: str, order: Order) -> None:
        # forked from a process that has only imported: without the time of imports, and without threads
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        receiver, sender = context.Pipe(duplex=False)
        taken = {slot for *_, slot in self._running.values()}
        slot = next(number for number in range(self.jobs) if number not in taken)
        process = context.Process(target=_work, args=(order, sender, str(slot % self.gpus) if self.gpus else None))
        process.start()
        sender.close()  # a killed process then ends the connection
        self._running[key] = (process, receiver, time.monotonic(), slot)

    def wait(self, timeout: float) -> list[CellOutcome]:
        """Cells that end within ``timeout`` seconds; returns at the first message."""
        ready = wait([receiver for _, receiver, *_ in self._running.values()], timeout)
        heard = [self._heard(key) for key, (_, receiver, *_) in list(self._running.items()) if receiver in ready]
        return [outcome for outcome in heard if outcome is not None]

    def _heard(self, key: str) -> CellOutcome | None:
        """End of a cell; None for a message about its activity."""
        process, receiver, begun, _ = self._running[key]
        try:
            ending, text = receiver.recv()
        except EOFError:  # it was killed, or ended without a message
            process.join()
            ending, text = "failed", f"its process ended with code {process.exitcode}; was there too little memory?"
        if ending == _AT_WORK:
            self.activities[key] = text
            return None
        del self._running[key]
        self.activities.pop(key, None)
        process.join()
        receiver.close()
        return CellOutcome(key, ending, text, time.monotonic() - begun)

    def close(self) -> None:
        """End all processes; each cell can be resumed."""
        for process, receiver, *_ in self._running.values():
            process.terminate()
            receiver.close()
        for process, *_ in self._running.values():
            process.join()
        self._running.clear()


# ---- in the process of a cell


class ActivitySender(Callback):
    """Sends through a pipe what a cell prepares, and when it trains again."""

    def __init__(self, sender: Connection) -> None:
        self._sender, self._last, self._when = sender, "", 0.0

    def handle(self, event: Event) -> None:
        text = ""
        if isinstance(event, Preparing):
            text = f"{event.what}: {event.done:,} of {event.total:,}" if event.total else event.what
        now = time.monotonic()
        if text != self._last and (now - self._when >= _EVERY or not text):
            self._last, self._when = text, now
            self._sender.send((_AT_WORK, text))


def _work(order: Order, sender: Connection, gpu: str | None) -> None:
    _end_with_parent()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    order.folder.parent.mkdir(parents=True, exist_ok=True)
    log = order.folder.with_name(order.folder.name + _LOG)
    try:
        with log.open("a") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            activity = ActivitySender(sender)
            with heard_by(Callbacks([activity])):
                execute(order, [activity])
    except BaseException as error:  # the other cells go on
        with contextlib.suppress(OSError), log.open("a") as stream:
            traceback.print_exc(file=stream)
        sender.send(_reason(error))
        return
    log.unlink(missing_ok=True)
    sender.send(("done", ""))


def _reason(error: BaseException) -> tuple[Ending, str]:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return "no space", f"no space left on the disk ({cause.filename or 'writing'})"
        cause = cause.__cause__
    text = str(error) if isinstance(error, PolyfedError) else f"{type(error).__name__}: {error}"
    return "failed", " ".join(text.split())


def _end_with_parent() -> None:
    """End with the parent: a cell must not go on after its study was killed and started again."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
