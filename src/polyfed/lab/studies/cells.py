"""Cells: one row at one point with one seed, a run folder each; the cells of a study, and the searches of its rows."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from typing import Any

from polyfed.core.declarations import own_code
from polyfed.core.errors import ConfigError, RunError, nearest
from polyfed.core.files import whole, write_atomically
from polyfed.core.untrusted import file_json
from polyfed.data.source import path_of
from polyfed.lab.studies.column import ColumnSettings
from polyfed.lab.studies.search import Choice, Number, PatternSearch, Tunable, choice_label, items_of
from polyfed.lab.studies.study import Overrides, Point, Study, Tuning, is_set_by, point_label
from polyfed.runs.config_files import read_config
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.twins import with_groups

FIGURES = "figures.json"
"""File of a complete cell: digest of the configuration, and the figures."""

RECORDS, MODELS = "records", "models"
"""Parts of a cell that may stay."""

_PLACES = ("dir", "weights_dir", "cache_dir", "device_memory")
# settings that came later, and what they were until then: cells of before keep their names
_ADDED = {("public", "reserve"): 0}
# sections, of a component by its name, with settings that are gone, where each changed nothing: likewise
_FIRST = {"first_private": None, "first_public": None}
_FORM = {"form": "representations", "largest_score": None}
_GONE: dict[str, dict[str, Any]] = {
    "adapter lora": {"dropout": 0.0},
    "reply": {"prototypes": None},
    "algorithm creamfl_averaged.contrast": {"tau_inter": 0.5, "tau_intra": 0.5},
    "algorithm fedaid": {"mean": "uniform"},
    "algorithm fedaid.guidance": {"temperature": 0.07},
    "algorithm fedaid.teacher": {
        "aligner": "averaged",
        "broadcast": "shared",
        "measure": "task",
        "measure_share": 1.0,
        "measured_on": "aggregated",
    },
    "algorithm feddra": {"mean": "uniform"},
    "algorithm feddra.guidance": {"anchor_mode": "training", "temperature": 0.07},
    "algorithm fedet": {"share_head": True},
    "algorithm fedmd": _FIRST,
    "algorithm fedmkd.contrast": {"adapter_outputs": 10},
    "algorithm margin_weighted": _FIRST,
    **{f"algorithm {name}.public": _FORM for name in ("fedet", "fedgems", "fedmd", "fedmkd", "margin_weighted")},
    "optimizer": {"nesterov": False},
    "partition dirichlet": {"size_cap": True, "attempts": 1000},
    "augment": {"jitter": None},
    "rotate": {"resampling": "nearest"},
    "task segmentation": {"cross_entropy_weight": 1.0, "dice_weight": 1.0},
}
_LABELS = ("name", "description", "twin")
_OF_RUN = ("engine", "on_error", "plots", "sinks", "state_memory")
# cells share cores one each, and need no plots
_CELL = {"run.threads": 1, "run.output.plots": False}


@dataclass(frozen=True)
class Places:
    """Folders of data and pretrained weights, by default those of the environment, and the engine of client steps.

    None of them changes a figure.
    """

    data_dir: Path | str | None = None
    weights_dir: Path | str | None = None
    engine: str | None = None

    @property
    def overrides(self) -> Overrides:
        """Overrides of the settings; paths are absolute, as a run may be resumed from anywhere."""
        folders = {"data.dir": self.data_dir, "data.weights_dir": self.weights_dir}
        engine: Overrides = {"run.engine.name": self.engine} if self.engine else {}
        return {**{key: str(whole(path)) for key, path in folders.items() if path}, **engine}


@dataclass(frozen=True)
class Cell:
    """A run of a study.

    Attributes:
        row: Its row.
        point: Labels of the axes.
        experiment: Its experiment, resolved.
        purpose: Candidate of a search, such as ``rate x 2``; empty for final cells.
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
        """Digest of all settings that may change a figure, and of the data's files; equal for equal runs.

        Data are identified by names and sizes of their files, pretrained weights by their names, components from
        outside polyfed by their source code.
        """
        data = self.experiment.data
        paths = {name: getattr(source, "path", None) for name, source in data.sources.items()}
        files = {name: _files_in(data.data_folder, path) for name, path in paths.items() if path}
        return _digest({**self.settings, "files": files})

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that may change a result."""
        content = self.experiment.model_dump(mode="json")
        for key in _LABELS:
            content.pop(key)
        for section in ("exchange", "output"):  # whose keys were in run itself when cells were first named
            content["run"] |= content["run"].pop(section)
        engine = content["run"]["engine"]
        for section, keys in (("data", _PLACES), ("run", _OF_RUN)):
            content[section] = {key: value for key, value in content[section].items() if key not in keys}
        for (section, key), before in _ADDED.items():
            if content[section] and content[section].get(key) == before:
                del content[section][key]
        for source in content["data"]["sources"].values():
            for part in (source, source.get("of", {})):
                if not any(part.get("reading", {}).values()):  # came later too
                    part.pop("reading", None)
        if "." in engine["name"]:  # polyfed's own engines give the same figures; others may attack them
            content["run"]["engine"] = engine
        return {key: _with_gone(value, key) for key, value in content.items()} | {**self.sources}

    def folder(self, store: Path) -> Path:
        return store / self.digest

    @property
    def label(self) -> str:
        return cell_label(self.row, self.point, self.seed, self.purpose)


def _with_gone(content: Any, section: str, owner: str = "") -> Any:
    if isinstance(content, list):
        return [_with_gone(entry, section, owner) for entry in content]
    if not isinstance(content, Mapping):
        return content
    own = f"{section} {content.get('name')}"
    gone = _GONE.get(section, {}) | _GONE.get(own, {}) | _GONE.get(f"{owner}.{section}", {})
    if "frames" in content:  # the section ``augment`` of spectrograms never had the settings of images
        gone = {}
    return gone | {key: _with_gone(value, key, own) for key, value in content.items()}


def cell_label(row: str, point: Point, seed: int, purpose: str = "") -> str:
    """``creamfl, 0.1, seed 3``."""
    return ", ".join(filter(None, [row, *point, purpose, f"seed {seed}"]))


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]


@lru_cache
def _files_in(data_dir: Path | None, path: str) -> list[tuple[str, int]]:
    """Names and sizes of the files in a source's folder, which distinguish data of the same name."""
    folder = (data_dir or Path()) / Path(path).expanduser()
    files = [file for file in (folder.iterdir() if folder.is_dir() else [folder]) if file.is_file()]
    return sorted((file.name, file.stat().st_size) for file in files)


def require_data(experiment: Experiment) -> None:
    """Raise DataError if the folder of a source that is read is missing."""
    groups = experiment.clients.values()
    readers = [*groups, *(group.also for group in groups), experiment.server, experiment.public]
    for name in dict.fromkeys(reader.source for reader in readers if reader is not None and reader.source):
        if path := getattr(experiment.data.sources[name], "path", None):
            path_of(path, name, experiment.data.data_folder, may_be_file=True)


def resolve(study: Study, row: str, point: Point, places: Places, extra: Overrides | None = None) -> Experiment:
    """The experiment of a row at a point, with the run's own seed.

    Raises:
        ConfigError: A setting is wrong; the message names the row and the key.
    """
    settings = study.resolved(row)
    overrides = {**study.set, **settings.set, **study.overrides_at(point), **(extra or {}), **_CELL, **places.overrides}
    try:
        base = settings.base or study.base
        content = read_config(base) if isinstance(base, str) else base
        known = _expanded(content, overrides)
        experiment = Experiment.read(base, [f"{path}={json.dumps(value)}" for path, value in known.items()])
        if settings.groups is None and settings.twin is None:
            return _simulated(experiment)
        resolved = experiment.model_dump(mode="json")
        if settings.groups is not None:
            resolved = with_groups(resolved, settings.groups)
        if settings.twin is None:
            return _simulated(Experiment.parse(resolved))
        return _simulated(Experiment.read({**resolved, "twin": settings.twin.model_dump(mode="json")}))
    except ConfigError as error:
        at = f" at {point_label(point)}" if point else ""
        raise ConfigError(f"row '{row}'{at}: {error}") from error


def _simulated(experiment: Experiment) -> Experiment:
    """The experiment; raises ConfigError if its method or engine cannot run it."""
    engine = experiment.run.engine
    if engine.is_deployed:
        raise ConfigError("run.engine is a deployment, whose sites do not run cells; set run.engine to local")
    engine.require()
    _ = experiment.plan
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
    at = keys.index("*")
    section = reduce(lambda section, key: dict(items_of(section)).get(key), keys[:at], content)
    if not (names := [str(name) for name, _ in items_of(section)]):
        raise ConfigError(f"{path}: '{'.'.join(keys[:at])}' is empty, so that * matches no name")
    for name in names:
        yield from _paths(content, [*keys[:at], name, *keys[at + 1 :]], path)


# ---- figures of a complete cell


@dataclass(frozen=True)
class CellFigures:
    """The figures of a cell.

    Attributes:
        values: Digest of a column -> value, NaN for a missing one, or the reason why it cannot be measured.
        code: Version and state of the code that ran it.
        keep: Parts of the cell that stay: the most that any study requested.
        replies: Numbers of clipped and of excluded replies; empty for a cell of before they were counted.
    """

    values: Mapping[str, float | str]
    code: str = ""
    keep: str = RECORDS
    replies: Sequence[int] = ()

    @classmethod
    def of(cls, folder: Path) -> CellFigures | None:
        """The figures of a complete cell; None if it is incomplete.

        Raises:
            RunError: Its configuration was edited after the run, or the file is damaged.
        """
        try:
            content = file_json((folder / FIGURES).read_bytes())
            config = RunFolder(folder).config_digest()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RunError(f"'{folder / FIGURES}' cannot be read ({error}); delete '{folder}' to rerun it") from error
        if content.get("config") != config:
            raise RunError(f"'{folder / 'config.yaml'}' was edited after the run; delete the folder to run it again")
        values = {name: float("nan") if value is None else value for name, value in content["figures"].items()}
        return cls(values, content["code"], content["keep"], content.get("replies", ()))

    def save(self, folder: Path) -> None:
        """Write the figures, which completes the cell."""
        finite = {
            name: value if isinstance(value, str) or math.isfinite(value) else None
            for name, value in self.values.items()
        }
        content = {
            "config": RunFolder(folder).config_digest(),
            "code": self.code,
            "keep": self.keep,
            "replies": list(self.replies),
            "figures": finite,
        }
        write_atomically(folder / FIGURES, (json.dumps(content, indent=1) + "\n").encode())


_Place = tuple[str, Point]


@dataclass(frozen=True)
class Chosen:
    """Settings that tuning chose for a row and a seed.

    Attributes:
        factors: Kind of settings -> factor of the row's own values, for kinds that it has.
        settings: Path -> value, of changed settings.
        scores: Candidate in words -> validation figure, in the order of the search.
        ends: Kinds whose best value is at an end of the search.
    """

    factors: Choice
    settings: Mapping[str, Number]
    scores: Mapping[str, float]
    ends: Sequence[str] = ()


class SearchIncompleteError(Exception):
    """The search of a row and a seed is incomplete."""


@dataclass
class RowSearch:
    """The search of a row and a seed, which goes as far as figures are known.

    Attributes:
        pattern: Candidates in the order of the search.
        lower: True if lower figures are better.
        place: The row, and the point of the search.
        tried: Its experiment, with the run's seed, and the settings that may change.
        figure: Figure of a cell; NaN without one; None if the cell is incomplete.
    """

    pattern: PatternSearch
    lower: bool
    place: _Place
    tried: Tunable
    figure: Callable[[Cell], float | None]
    _cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def cells(self) -> list[Cell]:
        """Cells of all candidates known to be needed."""
        due = self.pattern.advance(self._score)
        return [self.cell(choice) for choice in [*(tried for tried, _ in self.pattern.scores), *due]]

    def cell(self, choice: Choice) -> Cell:
        """The cell of a candidate."""
        if (label := choice_label(choice)) not in self._cells:
            self._cells[label] = Cell(*self.place, self.tried.at(choice), label)
        return self._cells[label]

    def _score(self, choice: Choice) -> float | None:
        figure = self.figure(self.cell(choice))
        return -figure if self.lower and figure is not None else figure

    @cached_property
    def chosen(self) -> Chosen:
        """The settings that the search chose.

        Raises:
            SearchIncompleteError: A candidate is missing.
            RunError: No candidate has a figure.
        """
        pattern = self.pattern
        if pattern.advance(self._score):
            raise SearchIncompleteError
        try:
            best = pattern.best
        except LookupError as error:
            raise RunError(f"tuning.column: {error}") from error
        scores = {choice_label(choice): -score if self.lower else score for choice, score in pattern.scores}
        return Chosen(best, self.tried.changed(best), scores, pattern.ends)


@dataclass
class StudyPlan:
    """The cells of a study, and the searches of its rows.

    Attributes:
        study: The study that is planned.
        places: Folders of data and weights.
        store: Folder of all cells.
        known: (row, point, seed) -> earlier choice, in place of a search.
        failed: Cells of candidates that ended without figures; the next invocation tries them again.
    """

    study: Study
    places: Places
    store: Path
    known: Mapping[tuple[str, Point, int], Chosen] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    _resolved: dict[tuple[str, Point, str], Experiment] = field(default_factory=dict)
    _cells: dict[tuple[str, Point, int], Cell] = field(default_factory=dict)
    _tunable: dict[_Place, Tunable] = field(default_factory=dict)
    _searches: dict[tuple[str, Point, int], RowSearch] = field(default_factory=dict)

    @cached_property
    def main(self) -> StudyPlan | None:
        """The plan of the main table whose choices are taken; ``known`` are choices of its rows then."""
        tuning = self.study.tuning
        if tuning is None or tuning.table is None:
            return None
        return StudyPlan(Study.load(tuning.table, tuning.scale), self.places, self.store, self.known, self.failed)

    @property
    def tuning(self) -> Tuning | None:
        """The plan of search in force, its own or the main table's."""
        return self.main.study.tuning if self.main else self.study.tuning

    def row_points(self, only: Collection[str] | None = None) -> list[_Place]:
        """Rows, all or ``only`` these, each at its points; those of judged claims come first, others than main last."""
        judged = {operand.row for claim in self.study.claims.to_judge for operand in claim.operands}
        chosen = [row for row in self.study.rows if only is None or row in only]
        rows = sorted(chosen, key=lambda row: (row not in judged, not self.study.resolved(row).main))
        return [(row, point) for row in rows for point in self.study.points_of(row)]

    def columns(self, cell: Cell) -> list[ColumnSettings]:
        """Columns to measure in a cell; of a final one, those of all rows that are the same run."""
        if cell.purpose:
            assert self.tuning is not None
            assert self.tuning.column is not None
            return [self.tuning.column]
        equal = {"columns": {}, "main": True, "only": {}}
        runs = {row: self.study.resolved(row).model_copy(update=equal) for row in self.study.rows}
        columns = [self.study.columns_of(row).values() for row, run in runs.items() if run == runs[cell.row]]
        due = (one for of_row in columns for one in of_row if not one.once or cell.seed == self.study.seeds[0])
        return list({column.digest: column for column in due}.values())

    def kept(self, cell: Cell) -> str:
        """Parts of a cell that stay; of a candidate, its records."""
        return RECORDS if cell.purpose else self.study.keep

    def check(self, row: str, point: Point) -> Experiment:
        """An experiment of a row at a point.

        Raises:
            ConfigError: The row cannot be run there, a column cannot be measured, or the main table lacks its row.
        """
        experiment = self.experiment(row, point)
        for name, column in self.study.columns_of(row).items():
            _require(column, experiment, f"rows.{row}.columns.{name}")
        hint = f"; or give rows.{row}.tune: false"
        if (tuned_as := self._tuned_as(row)) and self.main:
            if tuned_as not in self.main.study.rows:
                there = nearest(tuned_as, self.main.study.rows)
                raise ConfigError(f"rows.{row}.tune: the main table has no row '{tuned_as}'; {there}{hint}")
        elif tuned_as and self.tuning and self.tuning.column:
            _require(self.tuning.column, self.experiment(row, point, self.tuning.set), "tuning.column", hint)
        return experiment

    def check_tuning(self, row_points: Iterable[_Place]) -> None:
        """Raise ConfigError if tuning names a setting that no row has."""
        tuning, seed = self.study.tuning, self.study.seeds[0]
        searches = list(filter(None, (self.row_search(*place, seed) for place in row_points)))
        for name, group in tuning.settings.items() if tuning else ():
            known = [path for search in searches if (own := search.pattern.kinds.get(name)) for path in own.values]
            for path in group.paths:
                if not any(fnmatchcase(other, path) for other in known):
                    where = f"tuning.settings.{name}.paths"
                    raise ConfigError(f"{where}: no tuned row has a number at '{path}' that may change")

    def search(self, row: str, point: Point, seed: int) -> list[Cell]:
        """The known cells of a search; empty without a search."""
        search = self.row_search(row, point, seed)
        return search.cells if search else []

    def chosen(self, row: str, point: Point, seed: int) -> Chosen | None:
        """The choice for a row and a seed; None without a search.

        Raises:
            SearchIncompleteError: A candidate is missing.
            RunError: No candidate has a figure.
        """
        if self.main:
            return self.main.chosen(*self._main_place(row), seed) if self._tuned_as(row) else None
        if (known := self.known.get((row, point, seed))) is not None:
            return known
        search = self.row_search(row, point, seed)
        return search.chosen if search else None

    def cell(self, row: str, point: Point, seed: int) -> Cell:
        """The cell of a row at a point with the choice of its seed; raises as ``chosen``."""
        if (row, point, seed) not in self._cells:
            chosen = self.chosen(row, point, seed)
            self._cells[row, point, seed] = self.cell_with(row, point, seed, chosen.factors if chosen else {})
        return self._cells[row, point, seed]

    def cell_with(self, row: str, point: Point, seed: int, factors: Choice) -> Cell:
        """The cell of a row at a point with given factors."""
        return Cell(row, point, with_seed(self._tunable_at(row, point).at(factors), seed))

    def experiment(self, row: str, point: Point, extra: Overrides | None = None) -> Experiment:
        """Experiment of a row at a point, with extra overrides."""
        key = row, point, repr(sorted((extra or {}).items(), key=str))
        if key not in self._resolved:
            self._resolved[key] = resolve(self.study, row, point, self.places, extra)
        return self._resolved[key]

    # ---- tuning

    def row_search(self, row: str, point: Point, seed: int) -> RowSearch | None:
        """The search of a row and a seed, for a point; None without settings to search."""
        tuning = self.study.tuning
        if tuning is None or not self._tuned_as(row):
            return None
        if self.main:
            return self.main.row_search(*self._main_place(row), seed)
        points = (point,) if tuning.at == "point" else self.study.points_of(row)
        place = row, points[0]
        if (*place, seed) not in self._searches:
            kinds = self._tunable_at(*place).kinds
            tried = Tunable(with_seed(self.experiment(*place, tuning.set), seed), kinds)

            def accepts(choice: Choice) -> bool:
                return tried.accepts(choice) and all(self._tunable_at(row, one).accepts(choice) for one in points)

            pattern = PatternSearch(kinds, tuning.candidates, accepts)
            assert tuning.column is not None
            self._searches[*place, seed] = RowSearch(pattern, tuning.column.lower, place, tried, self._score)
        search = self._searches[*place, seed]
        return search if search.pattern.kinds else None

    def _tuned_as(self, row: str) -> str:
        """The row whose search tunes a row, of the main table if there is one; empty for an untuned row."""
        tuning, tune = self.study.tuning, self.study.resolved(row).tune
        if tuning is None or tune is False:
            return ""
        is_elsewhere = tune is True and self.main and row not in self.main.study.rows
        return (tuning.default_row or row) if is_elsewhere else row if tune is True else str(tune)

    def _main_place(self, row: str) -> _Place:
        assert self.main is not None
        tuned_as = self._tuned_as(row)
        return tuned_as, self.main.study.points_of(tuned_as)[0]

    def _score(self, cell: Cell) -> float | None:
        (column,), figures = self.columns(cell), CellFigures.of(cell.folder(self.store))
        if figures is None or column.digest not in figures.values:
            return math.nan if cell.digest in self.failed else None
        value = figures.values[column.digest]
        return math.nan if isinstance(value, str) else value

    def _tunable_at(self, row: str, point: Point) -> Tunable:
        if (row, point) not in self._tunable:
            tuned_as = self._tuned_as(row)
            ladders = self.tuning.ladders(tuned_as) if self.tuning and tuned_as else {}
            of_axes = [overrides for axis in self.study.axes.values() for overrides in axis.overrides.values()]

            def is_of_axis(path: str) -> bool:  # settings of an axis are fixed
                return any(is_set_by(overrides, path) for overrides in of_axes)

            self._tunable[row, point] = Tunable.of(self.experiment(row, point), ladders, is_of_axis)
        return self._tunable[row, point]


def _require(column: ColumnSettings, experiment: Experiment, where: str, hint: str = "") -> None:
    try:
        column.require(experiment)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}{hint}") from error
