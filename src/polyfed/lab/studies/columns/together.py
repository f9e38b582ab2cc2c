"""What a federation of personal clients and a server is worth as a whole, in one figure."""

from __future__ import annotations

from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from polyfed.core.errors import ConfigError
from polyfed.lab.studies.column import ColumnSettings
from polyfed.lab.studies.columns.metric import Metric
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER


class Together(ColumnSettings):
    """The mean of a percentage of each kind of participant that a run has, as a choice on all of them compares it.

    With ``kind: validation`` the server's is of its validation samples. Clients have one split that they are judged on,
    which then must not be ``test``: ``tuning.set`` gives candidates another (``clients.*.test_split: validation``).
    """

    metrics: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(
        min_length=1, description="server or client group -> names of its metrics, whose mean is its percentage"
    )
    kind: Literal["test", "validation"] = "test"

    def require(self, experiment: Experiment) -> None:
        if not self._parts(experiment):
            raise ConfigError(f"metrics: the run has none of {', '.join(self.metrics)}")
        for parts in self._parts(experiment):
            for part in parts:
                part.require(experiment)
        for name in self.metrics if self.kind == "validation" else ():
            if name in experiment.clients and experiment.clients[name].test_split == "test":
                raise ConfigError(
                    f"kind: is validation, but clients.{name}.test_split is test; set another where this is compared"
                )

    def measure(self, run: Run) -> float:
        return fmean(fmean(part.measure(run) for part in parts) for parts in self._parts(run.experiment))

    def _parts(self, experiment: Experiment) -> list[list[Metric]]:
        """Metrics of each participant that the run has."""
        present = {*experiment.clients, *([SERVER] if experiment.server else [])}
        return [[self._part(of, name) for name in names] for of, names in self.metrics.items() if of in present]

    def _part(self, of: str, name: str) -> Metric:
        if of != SERVER:
            return Metric(metric=name, of=of)
        return Metric(metric=name, kind=self.kind, round="best" if self.kind == "validation" else "selected")
