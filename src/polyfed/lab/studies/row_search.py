"""The searches of rows' settings over figures of cells, some of which are still to be run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from statistics import fmean

from polyfed.core.errors import ConfigError, RunError
from polyfed.lab.studies.cells import Cell, CellFigures, with_seed
from polyfed.lab.studies.study import Overrides, Point, Study
from polyfed.lab.studies.tuning import Tuning, is_set_by
from polyfed.runs.experiment import Experiment
from polyfed.runs.pattern_search import Choice, Number, PatternSearch, choice_label
from polyfed.runs.tunable import Tunable

_Place = tuple[str, Point]


@dataclass(frozen=True)
class Chosen:
    """What tuning chose for a row.

    Attributes:
        factors: kind of settings -> factor of what the row has; kinds that it lacks are not there.
        settings: path -> value, of what has another value than before.
        scores: candidate in words -> mean validation figure, in the order in which they were tried.
        is_surrounded: whether all neighbours of the best were tried, so that more candidates would change nothing.
    """

    factors: Choice
    settings: Mapping[str, Number]
    scores: Mapping[str, float]
    is_surrounded: bool


@dataclass
class RowSearch:
    """A pattern search that goes as far as figures are known.

    Attributes:
        pattern: what is tried.
        tuning: the plan.
        place: the row, and the point at which it is tried.
        tried: its experiment with other settings.
        figure: of a cell; NaN: it has none; None: it is not complete.
    """

    pattern: PatternSearch
    tuning: Tuning
    place: _Place
    tried: Tunable
    figure: Callable[[Cell], float | None]
    _cells: dict[str, list[Cell]] = field(default_factory=dict)

    @property
    def cells(self) -> list[Cell]:
        """Those of all candidates that are known to be needed."""
        due = self.pattern.advance(self._score)
        return [cell for choice in (*(tried for tried, _ in self.pattern.scores), *due) for cell in self._of(choice)]

    def _of(self, choice: Choice) -> list[Cell]:
        """The cells of a candidate, one a seed."""
        if (label := choice_label(choice)) not in self._cells:
            experiment = self.tried.at(choice)
            self._cells[label] = [Cell(*self.place, with_seed(experiment, seed), label) for seed in self.tuning.seeds]
        return self._cells[label]

    @property
    def _sign(self) -> int:
        return -1 if self.tuning.column.lower else 1

    def _score(self, choice: Choice) -> float | None:
        figures = [figure for cell in self._of(choice) if (figure := self.figure(cell)) is not None]
        return self._sign * fmean(figures) if len(figures) == len(self.tuning.seeds) else None

    @cached_property
    def chosen(self) -> Chosen:
        """What it chose.

        Raises:
            LookupError: the search is not complete.
            RunError: no candidate has a figure.
        """
        pattern = self.pattern
        if pattern.advance(self._score):
            raise LookupError("the search is not complete")
        try:
            best = pattern.best
        except LookupError as error:
            raise RunError(f"tuning.column: {error}") from error
        settings = {
            path: value
            for name, kind in pattern.kinds.items()
            for path, value in kind.at(best[name]).items()
            if value != kind.values[path]
        }
        scores = {choice_label(choice): self._sign * score for choice, score in pattern.scores}
        return Chosen(best, settings, scores, pattern.is_surrounded)


@dataclass
class TuningPlan:
    """The searches of a study's rows.

    Attributes:
        study: whose.
        store: folder of all cells.
        experiment: of a row at a point, with further overrides.
        failed: cells of candidates that ended without figures; the next invocation tries them again.
    """

    study: Study
    store: Path
    experiment: Callable[[str, Point, Overrides], Experiment]
    failed: set[str] = field(default_factory=set)
    _tunable: dict[_Place, Tunable] = field(default_factory=dict)
    _searches: dict[_Place, RowSearch] = field(default_factory=dict)

    def of(self, row: str) -> Tuning | None:
        """The plan by which a row is tuned; None: it is not."""
        return self.study.tuning if self.study.resolved(row).tune is not False else None

    def search(self, row: str, point: Point) -> RowSearch | None:
        """That of a row, for a point; None where it has nothing to choose."""
        tuning = self.of(row)
        if tuning is None:
            return None
        points = (point,) if tuning.at == "point" else self.study.points_of(row)
        place = row, points[0]
        if place not in self._searches:
            self._searches[place] = self._begun(tuning, place, points)
        search = self._searches[place]
        return search if search.pattern.kinds else None

    def tuned(self, row: str, point: Point) -> Experiment:
        """A row at a point with what was chosen; raises as ``RowSearch.chosen``."""
        search = self.search(row, point)
        return self._at(row, point).at(search.chosen.factors if search else {})

    def check(self, places: Iterable[_Place]) -> None:
        """Raise ConfigError if tuning names a setting that no row has."""
        tuning = self.study.tuning
        searches = list(filter(None, (self.search(*place) for place in places)))
        for name, kind in tuning.settings.items() if tuning else ():
            known = [path for search in searches if (own := search.pattern.kinds.get(name)) for path in own.values]
            for path in kind.paths:
                if not any(fnmatchcase(other, path) for other in known):
                    where = f"tuning.settings.{name}.paths"
                    raise ConfigError(f"{where}: no row that is tuned has a number at '{path}' that could be another")

    def most_candidates(self, places: Iterable[_Place]) -> int:
        """How many runs all searches have at most; a search that rows share counts once."""
        tuning = self.study.tuning
        if tuning is None:
            return 0
        first = {search.cells[0].digest for place in places if (search := self.search(*place))}
        return len(first) * tuning.candidates * len(tuning.seeds)

    def _begun(self, tuning: Tuning, place: _Place, points: Sequence[Point]) -> RowSearch:
        kinds = self._at(*place).kinds
        tried = Tunable(self.experiment(*place, tuning.set), kinds)

        def accepts(choice: Choice) -> bool:
            return tried.accepts(choice) and all(self._at(place[0], point).accepts(choice) for point in points)

        return RowSearch(PatternSearch(kinds, tuning.candidates, accepts), tuning, place, tried, self._figure)

    def _figure(self, cell: Cell) -> float | None:
        assert self.study.tuning is not None
        digest, figures = self.study.tuning.column.digest, CellFigures.of(cell.folder(self.store))
        if figures is None or digest not in figures.values:
            return math.nan if cell.digest in self.failed else None
        value = figures.values[digest]
        return math.nan if isinstance(value, str) else value

    def _at(self, row: str, point: Point) -> Tunable:
        if (row, point) not in self._tunable:
            tuning, kinds = self.of(row), self.study.resolved(row).tune
            ladders = tuning.ladders if tuning else {}
            if isinstance(kinds, list):
                ladders = {name: ladders[name] for name in ladders if name in kinds}
            self._tunable[row, point] = Tunable.of(self.experiment(row, point, {}), ladders, self._is_of_axis)
        return self._tunable[row, point]

    def _is_of_axis(self, path: str) -> bool:
        """What an axis sets stays as it says."""
        axes = self.study.axes.values()
        return any(is_set_by(overrides, path) for axis in axes for overrides in axis.overrides.values())
