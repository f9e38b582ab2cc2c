"""Which cells a study has, in the order of what they matter, and what a row's tuning has chosen."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from polyfed.core.errors import ConfigError
from polyfed.lab.studies.cells import Cell, Places, resolve, with_seed
from polyfed.lab.studies.column import ColumnSettings
from polyfed.lab.studies.row_search import Chosen, TuningPlan
from polyfed.lab.studies.study import Overrides, Point, Row, Study
from polyfed.runs.experiment import Experiment


@dataclass
class StudyPlan:
    """The cells of a study.

    Attributes:
        study: what is planned.
        places: where data are.
        store: folder of all cells.
    """

    study: Study
    places: Places
    store: Path
    _resolved: dict[tuple[str, Point, str], Experiment] = field(default_factory=dict)
    _final: dict[tuple[str, Point], list[Cell]] = field(default_factory=dict)

    @cached_property
    def tuning(self) -> TuningPlan:
        return TuningPlan(self.study, self.store, self._experiment)

    def row_points(self, only: Collection[str] | None = None) -> list[tuple[str, Point]]:
        """Rows, all or ``only`` these, each at its points; the main rows come first."""
        chosen = [row for row in self.study.rows if only is None or row in only]
        rows = sorted(chosen, key=lambda row: not self.study.resolved(row).main)
        return [(row, point) for row in rows for point in self.study.points_of(row)]

    def columns(self, cell: Cell) -> list[ColumnSettings]:
        if not cell.purpose:
            return self._of_run(cell.row)
        return [self.study.tuning.column] if self.study.tuning else []

    def _of_run(self, row: str) -> list[ColumnSettings]:
        rows = [other for other in self.study.rows if self._run_of(other) == self._run_of(row)]
        by_digest = {column.digest: column for other in rows for column in self.study.columns_of(other).values()}
        return list(by_digest.values())

    def _run_of(self, row: str) -> Row:
        return self._row(row).model_copy(update={"columns": {}, "main": True, "only": {}})

    def kept(self, cell: Cell) -> str:
        """What stays of it: of a cell that only helps to choose, records."""
        return "records" if cell.purpose else self.study.keep

    def check(self, row: str, point: Point) -> Experiment:
        """An experiment of a row at a point.

        Raises:
            ConfigError: the row cannot be run there, or a column cannot be measured.
        """
        experiment = self._experiment(row, point, {})
        for name, column in self.study.columns_of(row).items():
            _require(column, experiment, f"rows.{row}.columns.{name}")
        if (tuning := self.tuning.of(row)) is not None:
            hint = f"; or give rows.{row}.tune: false"
            _require(tuning.column, self._experiment(row, point, tuning.set), "tuning.column", hint)
        return experiment

    def search(self, row: str, point: Point) -> list[Cell]:
        """The cells from which settings of a row are chosen, as far as they are known; none where nothing is chosen."""
        search = self.tuning.search(row, point)
        return search.cells if search else []

    def final(self, row: str, point: Point) -> list[Cell]:
        """The cells of a row at a point with what was chosen, one a seed.

        Raises:
            LookupError: the search is not complete.
            RunError: no candidate has a figure.
        """
        if (row, point) not in self._final:
            experiment = self.tuning.tuned(row, point)
            self._final[row, point] = [Cell(row, point, with_seed(experiment, seed)) for seed in self.study.seeds]
        return self._final[row, point]

    def chosen(self, row: str, point: Point) -> Chosen | None:
        """What the search chose; None where nothing is to be chosen.

        Raises:
            LookupError: it is not complete.
            RunError: no candidate has a figure.
        """
        search = self.tuning.search(row, point)
        return search.chosen if search else None

    # ---- experiments

    def _experiment(self, row: str, point: Point, extra: Overrides) -> Experiment:
        key = row, point, repr(sorted(extra.items(), key=str))
        if key not in self._resolved:
            self._resolved[key] = resolve(self.study, row, point, self.places, extra)
        return self._resolved[key]

    def _row(self, row: str) -> Row:
        return self.study.resolved(row)


def _require(column: ColumnSettings, experiment: Experiment, where: str, hint: str = "") -> None:
    try:
        column.require(experiment)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}{hint}") from error
