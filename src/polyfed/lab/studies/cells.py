"""Cells: one row at one point with one seed, a run folder named by the hash of its resolved configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from math import isfinite
from pathlib import Path
from typing import Any

from polyfed.core.declarations import own_code
from polyfed.core.errors import ConfigError, RunError
from polyfed.core.files import whole, write_atomically
from polyfed.core.untrusted import file_json
from polyfed.data.source import path_of
from polyfed.lab.studies.study import Overrides, Point, Study, point_label
from polyfed.runs.config_files import read_config
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.preflight import require_settings
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
        data = self.experiment.data
        paths = {name: getattr(source, "path", None) for name, source in data.sources.items()}
        content["files"] = {name: _files_in(data.data_folder, path) for name, path in paths.items() if path}
        content |= self.sources
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]

    def folder(self, store: Path) -> Path:
        return store / self.digest

    @property
    def label(self) -> str:
        return ", ".join(filter(None, [self.row, *self.point, self.purpose, f"seed {self.seed}"]))


@lru_cache
def _files_in(data_dir: Path | None, path: str) -> list[tuple[str, int]]:
    """Names and sizes of the files in a source's folder; other data of the same name must not pass for these."""
    folder = (data_dir or Path()) / Path(path).expanduser()
    files = [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
    return sorted((file.name, file.stat().st_size) for file in files)


def require_data(experiment: Experiment) -> None:
    """Raise DataError if the folder of a source that somebody reads is not there."""
    groups = experiment.clients.values()
    readers = [*groups, *(group.also for group in groups), experiment.server, experiment.public]
    for name in dict.fromkeys(reader.source for reader in readers if reader is not None and reader.source):
        if path := getattr(experiment.data.sources[name], "path", None):
            path_of(path, name, experiment.data.data_folder)


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
    """

    values: Mapping[str, float | str]
    code: str = ""
    keep: str = RECORDS
    replies: Sequence[int] = ()

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
        return cls(values, content["code"], content["keep"], content.get("replies", ()))

    def save(self, folder: Path) -> None:
        """Write them, which makes the cell complete."""
        finite = {
            name: value if isinstance(value, str) or isfinite(value) else None for name, value in self.values.items()
        }
        content = {
            "config": RunFolder(folder).config_digest(),
            "code": self.code,
            "keep": self.keep,
            "replies": list(self.replies),
            "figures": finite,
        }
        write_atomically(folder / FIGURES, (json.dumps(content, indent=1) + "\n").encode())
