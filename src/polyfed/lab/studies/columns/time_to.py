"""When a metric of the server reached a value, in the virtual time of a run."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from polyfed.core.errors import ConfigError, nearest
from polyfed.federation.paces import Sync
from polyfed.lab.studies.column import ColumnSettings
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.runs.records import PACE, SERVER


class TimeTo(ColumnSettings):
    """Virtual seconds until a metric of the server was first as high as ``target``; none where it never was."""

    metric: str = Field(description="its name, such as r1_sum")
    target: float = Field(description="what it is to reach")
    kind: Literal["test", "validation"] = "test"
    lower: bool = True

    def require(self, experiment: Experiment) -> None:
        if isinstance(experiment.run.pace, Sync) and experiment.run.pace.clients is None:
            raise ConfigError("run.pace.clients is null, so that the run has no virtual time; set it to drawn")

    def measure(self, run: Run) -> float:
        records = run.records
        values, seconds = records.series(SERVER, self.metric, self.kind), self._seconds(run)
        if not values:
            names = records.metric_names(SERVER, self.kind)
            raise ConfigError(
                f"metric: no '{self.metric}' of the server in '{run.name}'; {nearest(self.metric, names)}"
            )
        return next((seconds[number] for number, value in values.items() if value >= self.target), math.nan)

    def _seconds(self, run: Run) -> dict[int, float]:
        return {0: 0.0} | run.records.series(SERVER, "virtual_seconds", PACE)
