"""What a study takes: runs, folders of data, and pretrained weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.lab.downstream.suite import Suite
from polyfed.lab.studies.cells import Cell, Places, resolve
from polyfed.lab.studies.columns.downstream import Downstream
from polyfed.lab.studies.planning import StudyPlan
from polyfed.lab.studies.study import Study

_READS = "source"  # the setting by which clients, server and public set name a source
_OF_WEIGHTS = ("backbone", "weights", "vectors", "folders")


@dataclass(frozen=True)
class Effort:
    """What a study takes.

    Attributes:
        runs: whose figures it shows, of all seeds; what two rows share counts once.
        searches: runs that choose settings before, at most.
        data: folders below the data folder that clients, server, public set and probes read.
        weights: folders of pretrained weights and word vectors, or their names on the hub.
    """

    runs: int
    searches: int
    data: tuple[str, ...]
    weights: tuple[str, ...]

    @property
    def in_words(self) -> str:
        """``45 (+25)``: runs, and searches before them."""
        return f"{self.runs} (+{self.searches})" if self.searches else str(self.runs)

    @classmethod
    def of(cls, study: Study) -> Effort:
        """Of a whole study; nothing is opened."""
        plan = StudyPlan(study, Places(), Path())
        cells: set[str] = set()
        data: set[str] = set()
        weights: set[str] = set()
        for row, point in plan.row_points():
            cell = Cell(row, point, resolve(study, row, point, plan.places))
            cells.add(cell.digest)
            content = cell.experiment.model_dump(mode="json")
            data |= set(_folders(content["data"]["sources"], content))
            weights |= set(_pretrained(content))
        columns = [column for row in study.rows for column in study.columns_of(row).values()]
        for name, task in {(column.suite, column.task) for column in columns if isinstance(column, Downstream)}:
            suite = Suite.load(name).chosen([task]).model_dump(mode="json")
            data |= set(_folders(suite["sources"], suite["tasks"]))
        searches = plan.tuning.most_candidates(plan.row_points())
        return cls(len(cells) * len(study.seeds), searches, tuple(sorted(data)), tuple(sorted(weights)))


def _folders(sources: Mapping[str, Any], content: Mapping[str, Any]) -> Iterator[str]:
    names = {value for key, value in _leaves(content) if key == _READS}
    for name in names & set(sources):
        source = sources[name].get("of") or sources[name]
        if "path" in source:
            yield source["path"]


def _pretrained(content: Mapping[str, Any]) -> Iterator[str]:
    for key, value in _leaves(content):
        if key in _OF_WEIGHTS and isinstance(value, str):
            yield value


def _leaves(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Values at all levels, each with the nearest key above it."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            yield from _leaves(value, name)
    elif isinstance(content, list):
        for value in content:
            yield from _leaves(value, key)
    else:
        yield key, content
