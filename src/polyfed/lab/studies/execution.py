"""What happens in a cell: its run, or what is left of it, then its figures, then what need not stay goes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyfed.core.activity import preparing
from polyfed.core.device import cpu_threads
from polyfed.core.errors import PolyfedError, RunError
from polyfed.core.own_code import own_code
from polyfed.core.untrusted import file_json
from polyfed.lab.studies.cells import MODELS, RECORDS, CellFigures, Places
from polyfed.lab.studies.column import ColumnSettings
from polyfed.reporting.reported import resume, run
from polyfed.runs.events import Callback
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.opened import Run, open_run
from polyfed.runs.tuning import tuning_folder

_OF_MODELS = ("models", "vocabulary", "checkpoints", "arrays")


@dataclass(frozen=True)
class Order:
    """A cell to be done.

    Attributes:
        experiment: resolved.
        folder: of the cell.
        columns: what is measured.
        places: of data and weights.
        keep: what stays, as ``Study.keep``.
        sources: of components from outside polyfed, by which the folder is named.
    """

    experiment: Experiment
    folder: Path
    columns: Sequence[ColumnSettings]
    places: Places
    keep: str
    sources: Mapping[str, Mapping[str, str]]


def is_done(folder: Path, columns: Sequence[ColumnSettings], keep: str) -> bool:
    """Whether a cell has nothing left to do.

    Raises:
        RunError: its configuration was edited, or its figures are damaged.
    """
    known = CellFigures.of(folder)
    if known is None or _due(columns, known) or (keep == MODELS and not _has_models(folder)):
        return False
    return not any(_superfluous(folder, known.keep))


def _due(columns: Sequence[ColumnSettings], figures: CellFigures) -> list[ColumnSettings]:
    """Columns that were not measured, in their order; one that cannot be had stays so until its cell is deleted."""
    return [column for column in columns if column.digest not in figures.values]


def execute(order: Order, callbacks: Sequence[Callback] = ()) -> None:
    """Run the cell, or go on with it, and measure what is missing; of a complete one this changes nothing.

    ``callbacks`` follow the run.

    Raises:
        PolyfedError, OSError: what keeps the run from being complete.
    """
    known = _usable(order)
    if known is None:
        if own_code(order.experiment) != order.sources:
            raise RunError("its code was edited since the study began; the same command runs what it is by now")
        _complete(order, callbacks)
    values, kept = ({}, RECORDS) if known is None else (known.values, known.keep)
    keep = MODELS if MODELS in (order.keep, kept) else RECORDS  # another study that shares the cell may want them
    run = open_run(order.folder, data_dir=order.places.data_dir, weights_dir=order.places.weights_dir)
    with cpu_threads(order.experiment.run.threads):  # probes and analyses, as the run itself
        measured = {column.digest: _measured(column, run) for column in _due(order.columns, CellFigures(values))}
    replies = len(run.records.clipped()), len(run.records.excluded())
    CellFigures({**values, **measured}, _code(order.folder), keep, replies).save(order.folder)
    # after the figures are safe: a kill before them still finds the checkpoints to go on from
    for path in _superfluous(order.folder, keep):
        shutil.rmtree(path)


def _usable(order: Order) -> CellFigures | None:
    """The figures of a complete cell, unless models are wanted that were not kept: it is run once more."""
    known = CellFigures.of(order.folder)
    if known is None or _has_models(order.folder):
        return known
    if order.keep == RECORDS and all(column.is_at_hand(order.folder) for column in _due(order.columns, known)):
        return known
    shutil.rmtree(order.folder)
    return None


def _has_models(folder: Path) -> bool:
    return any((folder / name).is_dir() for name in ("models", "checkpoints"))


def _complete(order: Order, callbacks: Sequence[Callback]) -> None:
    if RunFolder(order.folder).has_begun():
        resume(order.folder, callbacks, quiet=True)
        return
    run(order.experiment, order.folder, callbacks, quiet=True)
    shutil.rmtree(tuning_folder(order.folder), ignore_errors=True)


def _measured(column: ColumnSettings, run: Run) -> float | str:
    preparing(f"measuring {column.component_name()}")  # a probe or an analysis may take minutes
    try:
        return column.measure(run)
    except PolyfedError as error:
        return str(error)


def _superfluous(folder: Path, keep: str) -> Iterator[Path]:
    """What need not stay: a study of hundreds of cells would fill a disk."""
    for name in _OF_MODELS if keep == RECORDS else ():
        if (folder / name).is_dir():
            yield folder / name


def _code(folder: Path) -> str:
    made = file_json((folder / "environment.json").read_bytes())
    return " ".join(filter(None, [made["versions"]["polyfed"], made["git"]]))
