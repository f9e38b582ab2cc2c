"""Which cells a study has, in the order of what they matter, and what a row's tuning has chosen."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from polyfed.core.errors import ConfigError
from polyfed.core.untrusted import file_json
from polyfed.lab.studies.cells import Cell, CellFigures, Places, resolve, with_seed
from polyfed.lab.studies.column import ColumnSettings
from polyfed.lab.studies.study import Overrides, Point, Row, Study
from polyfed.runs.experiment import Experiment
from polyfed.runs.tuning import RECORD, Choice

_SEED = 100  # of what is chosen, where a study says no other


@dataclass(frozen=True)
class Chosen:
    """What tuning chose for a row at a point.

    Attributes:
        values: name of the grid -> value.
        is_at_end: whether it lies at the end of a grid of numbers, so that there may be better ones beyond.
        scores: candidate in words -> mean validation figure.
    """

    values: Choice
    is_at_end: bool
    scores: Mapping[str, float]


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

    def row_points(self, only: Collection[str] | None = None) -> list[tuple[str, Point]]:
        """Rows, all or ``only`` these, each at its points; the main rows come first."""
        chosen = [row for row in self.study.rows if only is None or row in only]
        rows = sorted(chosen, key=lambda row: not self.study.resolved(row).main)
        return [(row, point) for row in rows for point in self.study.points_of(row)]

    def columns(self, cell: Cell) -> list[ColumnSettings]:
        if not cell.purpose:
            return self._of_run(cell.row)
        return [] if self.study.tuning is None or self._searches(cell.row) else [self.study.tuning.column]

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
        experiment = (self.search(row, point) or self.final(row, point))[0].experiment
        columns = {f"rows.{row}.columns.{name}": column for name, column in self.study.columns_of(row).items()}
        if self.study.tuning is not None and self._is_tuned(row):
            columns["tuning.column"] = self.study.tuning.column
        for where, column in columns.items():
            try:
                column.require(experiment)
            except ConfigError as error:
                raise ConfigError(f"{where}.{error}") from error
        return experiment

    def search(self, row: str, point: Point) -> list[Cell]:
        """The cells from which settings of a row are chosen; none where nothing is to be chosen."""
        tuning, seeds = self.study.tuning, self._search_seeds
        if self._searches(row):
            experiment = self._experiment(row, point, {})
            return [Cell(row, point, with_seed(experiment, seeds[0]), "tuning")]
        if tuning is None or not self._is_tuned(row):
            return []
        cells = self._tried(row, point, tuning.search.first())
        with suppress(LookupError):  # of a candidate that is not complete
            while due := self._beside(row, cells):
                cells += self._tried(row, point, due)
        return cells

    def _tried(self, row: str, point: Point, choices: Sequence[Choice]) -> list[Cell]:
        tuning = self.study.tuning
        assert tuning is not None
        return [
            Cell(
                row,
                point,
                with_seed(self._experiment(row, point, self._given(row, choice) | tuning.set), seed),
                choice_label(choice),
                choice,
            )
            for choice in choices
            for seed in tuning.seeds
        ]

    def _beside(self, row: str, cells: Sequence[Cell]) -> list[Choice]:
        """Neighbours of the best candidate that were not tried; raises LookupError if candidates are not complete."""
        assert self.study.tuning is not None
        tried = [cell.choice for cell in cells]
        return [
            choice for choice in self.study.tuning.search.around(self._of_grid(cells).values) if choice not in tried
        ]

    def final(self, row: str, point: Point, seeds: Sequence[int] | None = None) -> list[Cell]:
        """The cells of a row at a point with what was chosen, one a seed: the study's, or ``seeds``.

        Raises:
            LookupError: the search is not complete.
        """
        chosen = self.chosen(row, point)
        experiment = self._experiment(row, point, self._extra(row, chosen))
        if self._searches(row) and chosen is not None and experiment.twin is not None:
            tuned = {"rates": (chosen.values["rate"],), "passes": (chosen.values["passes"],)}
            experiment = experiment.model_copy(update={"twin": experiment.twin.model_copy(update=tuned)})
        return [
            Cell(row, point, with_seed(experiment, seed)) for seed in (self.study.seeds if seeds is None else seeds)
        ]

    def chosen(self, row: str, point: Point) -> Chosen | None:
        """What the search chose; None where nothing is to be chosen.

        Raises:
            LookupError: it is not complete.
        """
        cells = self.search(row, point)
        if not cells:
            return None
        return self._of_twin(cells[0]) if self._searches(row) else self._of_grid(cells)

    def candidates(self, row: str) -> int:
        """How many runs a row's search has at a point; a twin's own search is one, of several candidates."""
        if self._searches(row):
            return 1
        tuning = self.study.tuning
        return len(tuning.search.first()) * len(tuning.seeds) if tuning and self._is_tuned(row) else 0

    # ---- choosing

    def _of_grid(self, cells: Sequence[Cell]) -> Chosen:
        tuning = self.study.tuning
        assert tuning is not None
        by_choice: dict[str, list[float]] = {}
        for cell in cells:
            value = _value(CellFigures.of(cell.folder(self.store)), tuning.column)
            by_choice.setdefault(cell.purpose, []).append(value)
        scores = {name: fmean(values) for name, values in by_choice.items()}
        sign = -1 if tuning.column.lower else 1
        ranked = {name: -math.inf if math.isnan(score) else sign * score for name, score in scores.items()}
        best = max(ranked, key=ranked.__getitem__)
        if ranked[best] == -math.inf:
            raise LookupError(f"tuning.column: no candidate of row '{cells[0].row}' has a figure; nothing is chosen")
        values = next(cell.choice for cell in cells if cell.purpose == best)
        return Chosen(values, tuning.search.is_at_end(values), scores)

    def _of_twin(self, cell: Cell) -> Chosen:
        path = cell.folder(self.store) / RECORD
        if CellFigures.of(path.parent) is None:
            raise LookupError(cell.label)
        record: dict[str, Any] = file_json(path.read_bytes())
        scores = {
            choice_label(dict(rate=row["rate"], passes=row["passes"])): row["validation"]
            for row in record["candidates"]
        }
        scores = {name: math.nan if value is None else value for name, value in scores.items()}
        return Chosen(record["chosen"], record["at_end_of_grid"], scores)

    def _extra(self, row: str, chosen: Chosen | None) -> Overrides:
        if chosen is None or self._searches(row) or self.study.tuning is None:
            return {}
        return self._given(row, chosen.values) | self.study.tuning.final

    def _given(self, row: str, choice: Choice) -> Overrides:
        assert self.study.tuning is not None
        tune = self.study.resolved(row).tune
        paths = {**self.study.tuning.paths, **(tune if isinstance(tune, dict) else {})}
        return {path: value for name, value in choice.items() for path in paths[name]}

    # ---- experiments

    def _experiment(self, row: str, point: Point, extra: Overrides) -> Experiment:
        key = row, point, repr(sorted(extra.items(), key=str))
        if key not in self._resolved:
            self._resolved[key] = resolve(self.study, row, point, self.places, extra)
        return self._resolved[key]

    @property
    def _search_seeds(self) -> list[int]:
        if self.study.tuning:
            return self.study.tuning.seeds
        return [next(seed for seed in count(_SEED) if seed not in (*self.study.seeds, *self.study.further_seeds))]

    def _row(self, row: str) -> Row:
        return self.study.resolved(row)

    def _is_tuned(self, row: str) -> bool:
        twin = self._row(row).twin
        return self._row(row).tune is not False and (twin is None or twin.kind == "no-private")

    def _searches(self, row: str) -> bool:
        twin = self._row(row).twin
        return twin is not None and twin.is_to_be_tuned and len(twin.rates) * len(twin.passes) > 1


def choice_label(choice: Choice) -> str:
    """``rate=0.01, passes=2``."""
    return ", ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in choice.items()
    )


def _value(figures: CellFigures | None, column: ColumnSettings) -> float:
    if figures is None or column.digest not in figures.values:
        raise LookupError
    value = figures.values[column.digest]
    return math.nan if isinstance(value, str) else value
