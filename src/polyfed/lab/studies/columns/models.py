"""Figures of a run's models: of analyses, and of probes of frozen encoders."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, JsonValue

from polyfed.core.declarations import is_file_class, own_code
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.untrusted import file_json
from polyfed.lab.analysis.analysis import FOLDER, Analysis, analysis_class, json_value, ready_folder, with_settings
from polyfed.lab.studies.column import ColumnSettings
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run


class AnalysisColumn(ColumnSettings):
    """A figure in the JSON of an analysis (``polyfed analyse``), whose files are kept in the cell."""

    short_name: ClassVar[str] = "analysis"

    analysis: str = Field(description="name of an analysis, or a class in a file next to the study, FILE.py:Class")
    figure: str = Field(description="dotted path in the JSON, such as overall_decrease or eigenvalues.0")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="settings of the analysis, by name")

    @property
    def asked(self) -> Analysis:
        """The analysis with its settings.

        Raises:
            ConfigError: The analysis is unknown, or a setting is wrong.
        """
        analysis = analysis_class(self.analysis)
        try:
            return with_settings(analysis, self.options)
        except ConfigError as error:
            raise ConfigError(f"options: {error}") from error

    @property
    def identity(self) -> dict[str, Any]:
        """Identity by class and code for an analysis in a file, independent of its path."""
        if not is_file_class(self.analysis):
            return super().identity
        asked = self.asked
        return super().identity | {"analysis": asked.title()} | own_code(asked)

    def require(self, experiment: Experiment) -> None:
        _ = self.asked

    @property
    def needs_models(self) -> bool:
        return True

    def is_at_hand(self, folder: Path) -> bool:
        """True if the saved result of the analysis, shared by its columns, is there."""
        return super().is_at_hand(folder) or _saved(folder, self.asked, self._given) is not None

    def measure(self, run: Run) -> float:
        return json_value(_content(run, self.analysis, self._given), self.figure)

    @property
    def _given(self) -> str:
        return json.dumps(self.options, sort_keys=True)


@lru_cache(maxsize=32)  # columns share an analysis, which may take minutes
def _content(run: Run, name: str, options: str) -> Any:
    asked = AnalysisColumn(analysis=name, figure="", options=json.loads(options)).asked
    content = _saved(run.folder, asked, options)
    if content is None:
        asked.answer(run).save(ready_folder(run.folder / FOLDER), asked.stem, options=options, **own_code(asked))
        content = _saved(run.folder, asked, options)
    return content


def _saved(folder: Path, asked: Analysis, options: str) -> Any:
    """Result of an analysis with these options and this code in a run's folder; None without one."""
    try:
        content = file_json((folder / FOLDER / f"{asked.stem}.json").read_bytes())
    except (OSError, ValueError):
        return None
    code = own_code(asked).get("own_code")
    # a file without its code is of an analysis in the package
    return content if content.get("options") == options and content.get("own_code", code) == code else None


class Downstream(ColumnSettings):
    """A metric of a task of a downstream suite, mean over its draws, of the run's final model."""

    short_name: ClassVar[str] = "downstream"

    suite: str = Field(description="name of a suite (polyfed downstream), or a YAML file")
    task: str = Field(description="task of the suite")
    metric: str = Field(description="name of the metric in the task's table")
    condition: str | None = Field(default=None, description="row of the task's table, such as 1 %; null: the first")
    client: str | None = Field(default=None, description="test this client's model; null: the server's")
    seed: int = Field(default=42, ge=0, description="of all draws")
    draws: int | None = Field(default=None, ge=1, description="draws; null: as in the suite")

    @property
    def identity(self) -> dict[str, Any]:
        """Identity by the name of the suite, independent of its path."""
        return super().identity | {"suite": Path(self.suite).stem}

    @property
    def needs_models(self) -> bool:
        return True

    def measure(self, run: Run) -> float:
        outcome = _task(run, self.suite, self.task, self.client, self.seed, self.draws)
        rows = {row["on"]: row["metrics"] for row in outcome["rows"]}
        row = next(iter(rows)) if self.condition is None else self.condition
        if row not in rows:
            raise ConfigError(f"condition: task '{self.task}' has no row '{row}'; {nearest(row, rows)}")
        if self.metric not in rows[row]:
            raise ConfigError(f"metric: task '{self.task}' does not measure it; {nearest(self.metric, rows[row])}")
        return float(rows[row][self.metric]["mean"])


@lru_cache(maxsize=32)  # columns share a task, which may take minutes
def _task(run: Run, suite: str, task: str, client: str | None, seed: int, draws: int | None) -> dict[str, Any]:
    from polyfed.lab.downstream.suite import Suite, opened_model, run_suite

    opened = opened_model(run, None, client)
    findings = run_suite(
        opened.subject, Suite.load(suite).only(task), opened.data, name=Path(suite).stem, seed=seed, draws=draws
    )
    content: dict[str, Any] = findings.figures["tasks"][task]
    return content
