"""Cells: one row at one point with one seed, a run folder each; those of a study, and the searches of its rows."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, reduce
from math import fsum
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from polyfed.core.declarations import own_code
from polyfed.core.errors import ConfigError, RunError
from polyfed.core.files import whole, write_atomically
from polyfed.core.untrusted import file_json
from polyfed.data.source import path_of
from polyfed.lab.studies.column import ColumnSettings
from polyfed.lab.studies.study import Overrides, Point, Study, Tuning, is_set_by, point_label
from polyfed.runs.config_files import read_config
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.preflight import require_settings
from polyfed.runs.tuning import Choice, Number, PatternSearch, Tunable, choice_label
from polyfed.runs.twins import with_groups

FIGURES = "figures.json"
"""Of a cell that is complete: digest of the configuration, and what was measured."""

RECORDS, MODELS = "records", "models"
"""What may stay of a cell."""

_PLACES = ("dir", "weights_dir", "cache_dir")
_LABELS = ("name", "description", "twin")
_OF_RUN = ("engine", "plots", "sinks", "state_memory")
# cells share cores one each, and nobody looks at the plots of hundreds
_CELL = {"run.threads": 1, "run.output.plots": False}


@dataclass(frozen=True)
class Places:
    """Where data and pretrained weights are, if not where the environment says, and where client steps execute.

    None of it changes a figure.
    """

    data_dir: Path | str | None = None
    weights_dir: Path | str | None = None
    engine: str | None = None

    @property
    def overrides(self) -> Overrides:
        """As settings; paths are absolute, as a run is resumed from anywhere."""
        folders = {"data.dir": self.data_dir, "data.weights_dir": self.weights_dir}
        engine: Overrides = {"run.engine.name": self.engine} if self.engine else {}
        return {**{key: str(whole(path)) for key, path in folders.items() if path}, **engine}


@dataclass(frozen=True)
class Cell:
    """A run of a study.

    Attributes:
        row: its row.
        point: labels of the axes.
        experiment: resolved.
        purpose: what a run that only chooses something is for, such as ``rate x 2``; empty of all others.
    """

    row: str
    point: Point
    experiment: Experiment
    purpose: str = ""

    @property
    def seed(self) -> int:
        return self.experiment.run.seed

    @cached_property
    def sources(self) -> Mapping[str, Mapping[str, str]]:
        """Digests of the modules of components from outside polyfed."""
        return own_code(self.experiment)

    @cached_property
    def digest(self) -> str:
        """Equal for equal runs: of all settings but names, places, and what changes no figure, and of the data's files.

        Data are known by the names and sizes of their files, pretrained weights by their names, components from outside
        polyfed by their source code.
        """
        data = self.experiment.data
        paths = {name: getattr(source, "path", None) for name, source in data.sources.items()}
        files = {name: _files_in(data.data_folder, path) for name, path in paths.items() if path}
        return _digest({**self._content, "files": files})

    @property
    def settings_digest(self) -> str:
        """As ``digest``, but of settings alone: whatever the seed is, and whether the data are at hand or not."""
        content = self._content
        del content["run"]["seed"]
        return _digest(content)

    @property
    def _content(self) -> dict[str, Any]:
        content = self.experiment.model_dump(mode="json")
        for key in _LABELS:
            content.pop(key)
        for section in ("exchange", "output"):  # whose keys stood in run itself, by which cells are known
            content["run"] |= content["run"].pop(section)
        engine = content["run"]["engine"]
        for section, keys in (("data", _PLACES), ("run", _OF_RUN)):
            content[section] = {key: value for key, value in content[section].items() if key not in keys}
        if "." in engine["name"]:  # polyfed's own engines give the same figures; somebody else's may attack them
            content["run"]["engine"] = engine
        return content | {**self.sources}

    def folder(self, store: Path) -> Path:
        return store / self.digest

    @property
    def label(self) -> str:
        return ", ".join(filter(None, [self.row, *self.point, self.purpose, f"seed {self.seed}"]))


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]


@lru_cache
def _files_in(data_dir: Path | None, path: str) -> list[tuple[str, int]]:
    """Names and sizes of the files in a source's folder; other data of the same name must not pass for these."""
    folder = (data_dir or Path()) / Path(path).expanduser()
    files = [file for file in (folder.iterdir() if folder.is_dir() else [folder]) if file.is_file()]
    return sorted((file.name, file.stat().st_size) for file in files)


def require_data(experiment: Experiment) -> None:
    """Raise DataError if the folder of a source that somebody reads is not there."""
    groups = experiment.clients.values()
    readers = [*groups, *(group.also for group in groups), experiment.server, experiment.public]
    for name in dict.fromkeys(reader.source for reader in readers if reader is not None and reader.source):
        if path := getattr(experiment.data.sources[name], "path", None):
            path_of(path, name, experiment.data.data_folder, may_be_file=True)


def resolve(study: Study, row: str, point: Point, places: Places, extra: Overrides | None = None) -> Experiment:
    """The experiment of a row at a point, with the run's own seed.

    Raises:
        ConfigError: a setting is wrong; the message says in which row, and where.
    """
    settings = study.resolved(row)
    overrides = {**study.set, **settings.set, **study.overrides_at(point), **(extra or {}), **_CELL, **places.overrides}
    try:
        base = settings.base or study.base
        content = read_config(base) if isinstance(base, str) else base
        known = _expanded(content, overrides)
        experiment = Experiment.read(content, [f"{path}={json.dumps(value)}" for path, value in known.items()])
        if settings.groups is None and settings.twin is None:
            return _simulated(experiment)
        resolved = experiment.model_dump(mode="json")
        if settings.groups is not None:
            resolved = with_groups(resolved, settings.groups)
        if settings.twin is None:
            return _simulated(Experiment.parse(resolved))
        # tuned as all rows are, if at all, and not by its run
        twin = {**settings.twin.model_dump(mode="json"), "tuned": {}}
        return _simulated(Experiment.read({**resolved, "twin": twin}))
    except ConfigError as error:
        at = f" at {point_label(point)}" if point else ""
        raise ConfigError(f"row '{row}'{at}: {error}") from error


def _simulated(experiment: Experiment) -> Experiment:
    """The experiment, if its method and engine can run it; raises ConfigError if not."""
    engine = experiment.run.engine
    if engine.is_deployed:
        raise ConfigError("run.engine is a deployment, whose sites are not asked for cells; set run.engine to local")
    engine.require()
    require_settings(experiment)
    return experiment


def with_seed(experiment: Experiment, seed: int) -> Experiment:
    return experiment.model_copy(update={"run": experiment.run.model_copy(update={"seed": seed})})


def _expanded(content: Mapping[str, Any], overrides: Overrides) -> Overrides:
    return {
        ".".join(keys): value for path, value in overrides.items() for keys in _paths(content, path.split("."), path)
    }


def _paths(content: Any, keys: list[str], path: str) -> Iterator[list[str]]:
    if "*" not in keys:
        yield keys
        return
    place = keys.index("*")
    section = reduce(_below, keys[:place], content)
    names = [str(name) for name in (range(len(section)) if isinstance(section, list) else section or ())]
    if not names:
        raise ConfigError(f"{path}: there is nothing at '{'.'.join(keys[:place])}' that * could stand for")
    for name in names:
        yield from _paths(content, [*keys[:place], name, *keys[place + 1 :]], path)


def _below(section: Any, key: str) -> Any:
    if isinstance(section, list):
        return section[int(key)] if key.isdigit() and int(key) < len(section) else None
    return section.get(key) if isinstance(section, Mapping) else None


# ---- what a complete cell says


@dataclass(frozen=True)
class CellFigures:
    """What was measured in a cell.

    Attributes:
        values: digest of a column -> value, NaN where there is none, or why it cannot be had.
        code: version and state of the code that ran it.
        keep: what stays of the cell: the most that any study asked for.
        replies: how many were clipped, and excluded; empty of a cell that ran before they were counted.
        generation: of figures, as ``core.version.GENERATION`` was; 0 of a cell that ran before there was one.
    """

    values: Mapping[str, float | str]
    code: str = ""
    keep: str = RECORDS
    replies: Sequence[int] = ()
    generation: int = 0

    @classmethod
    def of(cls, folder: Path) -> CellFigures | None:
        """The figures of a complete cell; None if it is not complete.

        Raises:
            RunError: its configuration was edited after the run, or the file is damaged.
        """
        try:
            content = file_json((folder / FIGURES).read_bytes())
            config = RunFolder(folder).config_digest()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RunError(
                f"'{folder / FIGURES}' cannot be read ({error}); delete '{folder}' to run it again"
            ) from error
        if content.get("config") != config:
            raise RunError(f"'{folder / 'config.yaml'}' was edited after the run; delete the folder to run it again")
        values = {name: float("nan") if value is None else value for name, value in content["figures"].items()}
        known = content.get("replies", ()), content.get("generation", 0)
        return cls(values, content["code"], content["keep"], *known)

    def save(self, folder: Path) -> None:
        """Write them, which makes the cell complete."""
        finite = {
            name: value if isinstance(value, str) or math.isfinite(value) else None
            for name, value in self.values.items()
        }
        content = {
            "config": RunFolder(folder).config_digest(),
            "code": self.code,
            "keep": self.keep,
            "replies": list(self.replies),
            "generation": self.generation,
            "figures": finite,
        }
        write_atomically(folder / FIGURES, (json.dumps(content, indent=1) + "\n").encode())


_Place = tuple[str, Point]


@dataclass(frozen=True)
class Chosen:
    """What tuning chose for a row.

    Attributes:
        factors: kind of settings -> factor of what the row has; kinds that it lacks are not there.
        settings: path -> value, of what has another value than before.
        scores: candidate in words -> validation figures, one a seed of the tuning, in the order in which they were
            tried; a hopeless one has one alone.
        ends: kinds in which something better may lie beyond what was tried.
    """

    factors: Choice
    settings: Mapping[str, Number]
    scores: Mapping[str, Sequence[float]]
    ends: Sequence[str] = ()

    @property
    def seeds(self) -> int:
        """How many the tuning had."""
        return max(map(len, self.scores.values()))

    def slack(self, lower: bool = False) -> float:
        """How far the chosen candidate is from the best one, which was within the spread of it."""
        best = (min if lower else max)(map(fmean, self._complete))
        return abs(best - fmean(self.scores[choice_label(self.factors)]))

    def missed(self, other: Chosen, lower: bool = False) -> float:
        """What the search of another row gained more than this one, where it chose what was never tried here."""
        tried = [dict(part.rsplit(" x ", 1) for part in label.split(", ") if " x " in part) for label in self.scores]
        for name in self.factors.keys() & other.factors.keys():
            factors = [1.0, *(float(one.get(name, 1)) for one in tried)]
            if not min(factors) <= other.factors[name] <= max(factors):
                return max(0.0, other.gain(lower) - self.gain(lower))
        return 0.0

    def gain(self, lower: bool = False) -> float:
        """How much better the chosen candidate is than the settings as given."""
        gain = fmean(self.scores[choice_label(self.factors)]) - fmean(self.scores[choice_label({})])
        return -gain if lower else gain

    @property
    def spread(self) -> float:
        """Standard deviation over seeds, pooled over candidates; 0 of a single seed."""
        return math.sqrt(fmean(map(variance, self._complete))) if self.seeds > 1 else 0.0

    @property
    def doubt(self) -> float:
        """Standard error of a candidate's mean, without what a seed does to all candidates."""
        rows = self._complete
        if len(rows) == 1 or self.seeds == 1:
            return self.spread / math.sqrt(self.seeds)
        at_seed, overall = [*map(fmean, zip(*rows, strict=True))], fmean(map(fmean, rows))
        left = [one - fmean(values) - at + overall for values in rows for one, at in zip(values, at_seed, strict=True)]
        return math.sqrt(fsum(one**2 for one in left) / ((len(rows) - 1) * (self.seeds - 1) * self.seeds))

    @property
    def _complete(self) -> list[Sequence[float]]:
        """Figures of candidates that have one of every seed."""
        return [
            values for values in self.scores.values() if len(values) == self.seeds and not any(map(math.isnan, values))
        ]


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
        due = self.pattern.advance(self._figures)
        known = [cell for tried, values in self.pattern.scores for cell in self._of(tried)[: len(values)]]
        return known + [cell for choice in due for cell in self._needed(choice)]

    def _of(self, choice: Choice) -> list[Cell]:
        """The cells of a candidate, one a seed."""
        if (label := choice_label(choice)) not in self._cells:
            experiment = self.tried.at(choice)
            self._cells[label] = [Cell(*self.place, with_seed(experiment, seed), label) for seed in self.tuning.seeds]
        return self._cells[label]

    def _needed(self, choice: Choice) -> list[Cell]:
        """The first cell of a candidate, and the others unless that is hopeless; all of the first candidate."""
        cells = self._of(choice)
        first = self.figure(cells[0])
        is_needed = first is not None and not self.pattern.is_hopeless(self._sign * first)
        return cells if is_needed or not self.pattern.scores else cells[:1]

    @property
    def _sign(self) -> int:
        return -1 if self.tuning.column.lower else 1

    def _figures(self, choice: Choice) -> list[float] | None:
        known = [figure for cell in self._needed(choice) if (figure := self.figure(cell)) is not None]
        return [self._sign * figure for figure in known] if len(known) == len(self._needed(choice)) else None

    @cached_property
    def chosen(self) -> Chosen:
        """What it chose.

        Raises:
            LookupError: the search is not complete.
            RunError: no candidate has a figure.
        """
        pattern = self.pattern
        if pattern.advance(self._figures):
            raise LookupError("the search is not complete")
        try:
            chosen = pattern.chosen
        except LookupError as error:
            raise RunError(f"tuning.column: {error}") from error
        settings = {
            path: value
            for name, group in pattern.kinds.items()
            for path, value in group.at(chosen[name]).items()
            if value != group.values[path]
        }
        scores = {choice_label(choice): [self._sign * one for one in values] for choice, values in pattern.scores}
        return Chosen(chosen, settings, scores, pattern.ends)


@dataclass
class StudyPlan:
    """The cells of a study, and the searches of its rows.

    Attributes:
        study: what is planned.
        places: where data are.
        store: folder of all cells.
        failed: cells of candidates that ended without figures; the next invocation tries them again.
    """

    study: Study
    places: Places
    store: Path
    failed: set[str] = field(default_factory=set)
    _resolved: dict[tuple[str, Point, str], Experiment] = field(default_factory=dict)
    _final: dict[_Place, list[Cell]] = field(default_factory=dict)
    _tunable: dict[_Place, Tunable] = field(default_factory=dict)
    _searches: dict[_Place, RowSearch] = field(default_factory=dict)

    def row_points(self, only: Collection[str] | None = None) -> list[_Place]:
        """Rows, all or ``only`` these, each at its points; the main rows come first."""
        chosen = [row for row in self.study.rows if only is None or row in only]
        rows = sorted(chosen, key=lambda row: not self.study.resolved(row).main)
        return [(row, point) for row in rows for point in self.study.points_of(row)]

    def columns(self, cell: Cell) -> list[ColumnSettings]:
        """What is measured in a cell: of a final one, the columns of all rows that are the same run."""
        if cell.purpose:
            return [self.study.tuning.column] if self.study.tuning else []
        beside = {"columns": {}, "main": True, "only": {}}
        runs = {row: self.study.resolved(row).model_copy(update=beside) for row in self.study.rows}
        columns = [self.study.columns_of(row).values() for row, run in runs.items() if run == runs[cell.row]]
        due = (one for of_row in columns for one in of_row if not one.once or cell.seed == self.study.seeds[0])
        return list({column.digest: column for column in due}.values())

    def kept(self, cell: Cell) -> str:
        """What stays of it: of a cell that only helps to choose, records."""
        return "records" if cell.purpose else self.study.keep

    def check(self, row: str, point: Point) -> Experiment:
        """An experiment of a row at a point.

        Raises:
            ConfigError: the row cannot be run there, or a column cannot be measured.
        """
        experiment = self.experiment(row, point)
        for name, column in self.study.columns_of(row).items():
            _require(column, experiment, f"rows.{row}.columns.{name}")
        if (tuning := self._tuning(row)) is not None:
            hint = f"; or give rows.{row}.tune: false"
            _require(tuning.column, self.experiment(row, point, tuning.set), "tuning.column", hint)
        return experiment

    def check_tuning(self, places: Iterable[_Place]) -> None:
        """Raise ConfigError if tuning names a setting that no row has."""
        tuning = self.study.tuning
        searches = list(filter(None, (self.row_search(*place) for place in places)))
        for name, group in tuning.settings.items() if tuning else ():
            known = [path for search in searches if (own := search.pattern.kinds.get(name)) for path in own.values]
            for path in group.paths:
                if not any(fnmatchcase(other, path) for other in known):
                    where = f"tuning.settings.{name}.paths"
                    raise ConfigError(f"{where}: no row that is tuned has a number at '{path}' that could be another")

    def search(self, row: str, point: Point) -> list[Cell]:
        """The cells from which settings of a row are chosen, as far as they are known; none where nothing is chosen."""
        search = self.row_search(row, point)
        return search.cells if search else []

    def chosen(self, row: str, point: Point) -> Chosen | None:
        """What the search chose; None where nothing is to be chosen.

        Raises:
            LookupError: it is not complete.
            RunError: no candidate has a figure.
        """
        search = self.row_search(row, point)
        return search.chosen if search else None

    def final(self, row: str, point: Point) -> list[Cell]:
        """The cells of a row at a point with what was chosen, one a seed; raises as ``chosen``."""
        if (row, point) not in self._final:
            self._final[row, point] = self.cells_with(row, point, self.chosen(row, point))
        return self._final[row, point]

    def cells_with(self, row: str, point: Point, chosen: Chosen | None) -> list[Cell]:
        """The cells of a row at a point with settings that were chosen, one a seed."""
        experiment = self._tunable_at(row, point).at(chosen.factors if chosen else {})
        return [Cell(row, point, with_seed(experiment, seed)) for seed in self.study.seeds]

    def experiment(self, row: str, point: Point, extra: Overrides | None = None) -> Experiment:
        """That of a row at a point, with further overrides."""
        key = row, point, repr(sorted((extra or {}).items(), key=str))
        if key not in self._resolved:
            self._resolved[key] = resolve(self.study, row, point, self.places, extra)
        return self._resolved[key]

    # ---- tuning

    def row_search(self, row: str, point: Point) -> RowSearch | None:
        """That of a row, for a point; None where it has nothing to choose."""
        tuning = self._tuning(row)
        if tuning is None:
            return None
        points = (point,) if tuning.at == "point" else self.study.points_of(row)
        place = row, points[0]
        if place not in self._searches:
            kinds = self._tunable_at(*place).kinds
            tried = Tunable(self.experiment(*place, tuning.set), kinds)

            def accepts(choice: Choice) -> bool:
                return tried.accepts(choice) and all(self._tunable_at(row, one).accepts(choice) for one in points)

            pattern = PatternSearch(kinds, tuning.candidates, accepts, len(tuning.seeds))
            self._searches[place] = RowSearch(pattern, tuning, place, tried, self._score)
        search = self._searches[place]
        return search if search.pattern.kinds else None

    def _tuning(self, row: str) -> Tuning | None:
        """The plan by which a row is tuned; None: it is not."""
        return self.study.tuning if self.study.resolved(row).tune is not False else None

    def _score(self, cell: Cell) -> float | None:
        assert self.study.tuning is not None
        digest, figures = self.study.tuning.column.digest, CellFigures.of(cell.folder(self.store))
        if figures is None or digest not in figures.values:
            return math.nan if cell.digest in self.failed else None
        value = figures.values[digest]
        return math.nan if isinstance(value, str) else value

    def _tunable_at(self, row: str, point: Point) -> Tunable:
        if (row, point) not in self._tunable:
            tuning, names = self._tuning(row), self.study.resolved(row).tune
            ladders = tuning.ladders if tuning else {}
            if isinstance(names, list):
                ladders = {name: ladders[name] for name in ladders if name in names}
            of_axes = [overrides for axis in self.study.axes.values() for overrides in axis.overrides.values()]

            def is_of_axis(path: str) -> bool:  # what an axis sets stays as it says
                return any(is_set_by(overrides, path) for overrides in of_axes)

            self._tunable[row, point] = Tunable.of(self.experiment(row, point), ladders, is_of_axis)
        return self._tunable[row, point]


def _require(column: ColumnSettings, experiment: Experiment, where: str, hint: str = "") -> None:
    try:
        column.require(experiment)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}{hint}") from error
