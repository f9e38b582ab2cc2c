"""Figures of a run's models: of analyses, and of probes of frozen encoders."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, JsonValue, model_validator

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.removed import removed
from polyfed.core.untrusted import file_json
from polyfed.lab.analysis.questions import QUESTIONS
from polyfed.lab.analysis.results import ready_folder
from polyfed.lab.studies.column import ColumnSettings
from polyfed.runs.opened import Run

FOLDER = "analysis"
"""Of a cell's folder, where analyses and their pictures stay."""


class Analysis(ColumnSettings):
    """A figure in the JSON of an analysis (``polyfed analyse``), whose picture is kept in the cell."""

    short_name: ClassVar[str] = "analysis"

    analysis: str = Field(description="drift, features, weights, landscape, centres, ...")
    figure: str = Field(description="where it stands in the analysis' JSON, such as overall_decrease or eigenvalues.0")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="options of the analysis, by name")

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.analysis not in QUESTIONS:
            gone, valid = removed("analysis", self.analysis), nearest(self.analysis, QUESTIONS)
            raise ValueError(f"analysis {gone}" if gone else f"no analysis '{self.analysis}'; {valid}")
        try:
            QUESTIONS[self.analysis].require(self.options)
        except ConfigError as error:
            raise ValueError(f"options: {error}") from error
        return self

    @property
    def stem(self) -> str:
        """Name of its files in a cell's folder ``analysis``."""
        return QUESTIONS[self.analysis].stem(self.options)

    @property
    def _given(self) -> str:
        return json.dumps(self.options, sort_keys=True)

    @property
    def needs_models(self) -> bool:
        return True

    def is_at_hand(self, folder: Path) -> bool:
        """Columns share what an analysis has saved."""
        return super().is_at_hand(folder) or _saved(folder, self.stem, self._given) is not None

    def measure(self, run: Run) -> float:
        value = _content(run, self.analysis, self._given)
        for key in self.figure.split("."):
            known = {str(at): item for at, item in enumerate(value)} if isinstance(value, list | tuple) else value
            if not isinstance(known, dict) or key not in known:
                names = known if isinstance(known, dict) else ()
                raise ConfigError(f"figure {self.figure}: there is no '{key}'; {nearest(key, map(str, names))}")
            value = known[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"figure {self.figure}: is no number")
        return float(value)


@lru_cache(maxsize=32)  # several figures of one analysis, which may take minutes
def _content(run: Run, analysis: str, options: str) -> Any:
    question, given = QUESTIONS[analysis], json.loads(options)
    stem = question.stem(given)
    content = _saved(run.folder, stem, options)
    if content is None:
        question.of([run], given).save(ready_folder(run.folder / FOLDER), stem, options=options)
        content = _saved(run.folder, stem, options)
    return content["runs"][0] if question.takes_several else content


def _saved(folder: Path, stem: str, options: str) -> Any:
    """What an analysis with these options left in a run's folder; None if there is nothing."""
    try:
        content = file_json((folder / FOLDER / f"{stem}.json").read_bytes())
    except (OSError, ValueError):
        return None
    return content if content.get("options") == options else None


class Downstream(ColumnSettings):
    """A metric of a task of a downstream suite, mean over its draws, of the run's final model."""

    short_name: ClassVar[str] = "downstream"

    suite: str = Field(description="name of a suite (polyfed downstream), or a YAML file")
    task: str = Field(description="task of the suite")
    metric: str = Field(description="name of the metric in the task's table")
    condition: str | None = Field(default=None, description="row of the task's table, such as 1 %; null: the first")
    client: str | None = Field(default=None, description="test this client's model; null: the server's")
    seed: int = Field(default=42, ge=0, description="of all draws")
    draws: int | None = Field(default=None, ge=1, description="draws; null: as the suite says")

    @property
    def needs_models(self) -> bool:
        return True

    def measure(self, run: Run) -> float:
        places = (run.data_dir, run.weights_dir, run.device, run.allow_code)
        outcome = _task(run.folder, self.suite, self.task, self.client, self.seed, self.draws, places)
        rows = {row["on"]: row["metrics"] for row in outcome["rows"]}
        row = next(iter(rows)) if self.condition is None else self.condition
        if row not in rows:
            raise ConfigError(f"condition: task '{self.task}' has no row '{row}'; {nearest(row, rows)}")
        if self.metric not in rows[row]:
            raise ConfigError(f"metric: task '{self.task}' does not measure it; {nearest(self.metric, rows[row])}")
        return float(rows[row][self.metric]["mean"])


@lru_cache(maxsize=32)  # columns of one task share its probes, which take minutes
def _task(
    folder: Path, suite: str, task: str, client: str | None, seed: int, draws: int | None, places: tuple[Any, ...]
) -> dict[str, Any]:
    from polyfed.lab.downstream.model_choice import ModelChoice
    from polyfed.lab.downstream.suite import Suite, run_suite

    opened = ModelChoice(folder, None, client, None, seed, *places).open()
    findings = run_suite(
        opened.subject, Suite.load(suite).chosen([task]), opened.data, name=suite, seed=seed, draws=draws
    )
    content: dict[str, Any] = findings.figures["tasks"][task]
    return content
