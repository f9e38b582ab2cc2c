"""A metric of the server or of clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from polyfed.core.effects import require_default
from polyfed.core.errors import ConfigError, nearest
from polyfed.federation.settings import ServerSettings
from polyfed.lab.studies.column import ColumnSettings
from polyfed.reporting.client_spread import ClientSpread, selected_round
from polyfed.reporting.recalls import chance_of
from polyfed.reporting.statistics import finite_values
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER, RunRecords
from polyfed.tasks.task import Task

CLIENTS = "clients"
"""All clients, of whatever group."""

PRIMARY = "primary"
"""The metric that a client's task selects models by, whatever it is called."""


class Metric(ColumnSettings):
    """A metric of the server, or its mean, worst value or spread over clients, each after its last evaluation."""

    metric: str = Field(description="its name, such as r1_sum or accuracy; of clients also primary, that of their task")
    of: str = Field(default=SERVER, description="server, a group of clients, or clients for all of them")
    over: Literal["mean", "worst", "best", "disparity", "std"] = Field(
        default="mean", description="what of a group's values"
    )
    kind: Literal["test", "validation", "train"] = Field(
        default="test", description="train: what the server told of its steps, such as teacher.r1_sum"
    )
    round: Literal["selected", "final", "best"] = Field(
        default="selected",
        description="the round that validation selects (the last where nothing was validated), the last, or that with "
        "the highest value of all; of clients it is always the last",
    )

    @model_validator(mode="after")
    def _of_whom(self) -> Self:
        require_default(self, f"with of: {self.of}", "over" if self.of == SERVER else "round")
        if self.metric == PRIMARY and self.of == SERVER:
            raise ValueError(f"metric: {PRIMARY} is of clients, whose tasks an axis may change; name the server's")
        if self.kind == "train" and self.of != SERVER:
            raise ValueError(f"of: '{self.of}' with kind: train, which the server alone has; set of: {SERVER}")
        return self

    def require(self, experiment: Experiment) -> None:
        valid = [SERVER, CLIENTS, *experiment.clients]
        if self.of not in valid:
            raise ConfigError(f"of: no group '{self.of}'; {nearest(self.of, valid)}")
        tasks = [self._validated(experiment.server).task] if self.of == SERVER else self._tasks_of_clients(experiment)
        if self.kind == "train" or self.metric == PRIMARY:  # the method or the task decides
            return
        names = [name for task in tasks for name in task.metric_names]
        whole = self.metric.partition("_given_")[0]  # of samples that have just these modalities
        if all(task.metric_names for task in tasks) and whole not in names:  # else its data decide
            raise ConfigError(f"metric: '{self.of}' has no '{self.metric}'; {nearest(self.metric, names)}")

    def _tasks_of_clients(self, experiment: Experiment) -> list[Task]:
        if self.kind == "validation":
            raise ConfigError(f"kind: validation, but '{self.of}' is measured on test data alone")
        if experiment.run.evaluate_clients is False:
            raise ConfigError(f"of: '{self.of}' is not measured, as run.evaluate_clients is false")
        return [group.task for name, group in experiment.clients.items() if self.of in (name, CLIENTS)]

    def _validated(self, server: ServerSettings | None) -> ServerSettings:
        if server is None:
            raise ConfigError(
                "of: there is no server; name a group of clients, or take the column out of the row (null)"
            )
        if self.kind == "validation" and server.validation_split is None:
            raise ConfigError("kind: validation, but server.validation_split is null")
        return server

    def measure(self, run: Run) -> float:
        records = run.records
        if self.of == SERVER:
            return self._of_server(records)
        if self.of != CLIENTS and self.of not in records.groups:
            raise ConfigError(f"of: no group '{self.of}' in run '{run.name}'; {nearest(self.of, records.groups)}")
        names = self._names(run)
        members = [client for client in records.clients if client in names]
        values = {client: self._figure(records.last(client, self.kind), names[client]) for client in members}
        if not (finite := finite_values(values)):
            raise ConfigError(self._unknown(run.name, [n for m in members for n in records.metric_names(m, self.kind)]))
        return float(getattr(ClientSpread(self.of, self.metric, finite, len(members)), self.over))

    def _figure(self, metrics: Mapping[str, float], name: str) -> float:
        return metrics.get(name, math.nan)

    def _names(self, run: Run) -> dict[str, str]:
        """Client -> the metric that is its own."""
        groups = run.records.groups if self.of == CLIENTS else {self.of: run.records.groups[self.of]}
        return {client: self._name_in(run, group) for group, own in groups.items() for client in own}

    def _name_in(self, run: Run, group: str) -> str:
        return run.experiment.clients[group].task.primary if self.metric == PRIMARY else self.metric

    def _of_server(self, records: RunRecords) -> float:
        series = records.series(SERVER, self.metric, self.kind)
        if not series:
            raise ConfigError(self._unknown(records.name, records.metric_names(SERVER, self.kind)))
        if self.round == "best":
            highest = records.best(SERVER, self.metric, self.kind)
            return series[max(series)] if highest is None else highest[1]
        chosen = selected_round(records) if self.round == "selected" else None
        return series.get(max(series) if chosen is None else chosen, math.nan)

    def _unknown(self, run: str, names: object) -> str:
        valid = nearest(self.metric, dict.fromkeys(names))  # type: ignore[call-overload]
        return f"metric: nobody in '{self.of}' of run '{run}' has '{self.metric}' on {self.kind}; {valid}"


class Chance(Metric):
    """What guessing reaches of a metric on the same test items, whose galleries shrink where items lack a modality."""

    short_name: ClassVar[str] = "chance"
    is_outcome: ClassVar[bool] = False

    def _figure(self, metrics: Mapping[str, float], name: str) -> float:
        return chance_of(name, metrics)

    def _of_server(self, records: RunRecords) -> float:
        return chance_of(self.metric, records.last(SERVER, self.kind))
