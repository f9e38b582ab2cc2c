"""Probes of frozen encoders."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from polyfed.core.errors import ConfigError, nearest
from polyfed.lab.studies.column import ColumnSettings
from polyfed.runs.opened import Run


class Downstream(ColumnSettings):
    """A metric of a task of a downstream suite, mean over its draws, of the run's final model."""

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
