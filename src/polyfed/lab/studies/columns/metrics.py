"""Metrics of a run: of the server, of clients, of both together, and the time to reach one; analyses; gauges.

Gauges show below a table whether a method's mechanism could act in a run; they are never judged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, PositiveInt, SerializeAsAny, field_validator, model_validator

from polyfed.core.declarations import is_file_class, own_code
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.settings import require_default
from polyfed.core.untrusted import file_json
from polyfed.federation.paces import Sync
from polyfed.federation.settings import ServerSettings
from polyfed.lab.analysis.analysis import FOLDER, Analysis, analysis_class, json_value, ready_folder, with_settings
from polyfed.lab.studies.column import ColumnSettings, named_column
from polyfed.reporting.metrics import ClientSpread, chance_of
from polyfed.reporting.statistics import finite_values
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.runs.records import PACE, SERVER, RunRecords
from polyfed.tasks.task import Task

_ROUNDS = {"first": slice(1), "last": slice(-1, None), "all": slice(None)}

CLIENTS = "clients"
"""All clients of all groups."""

PRIMARY = "primary"
"""The metric by which a client's task selects models."""


class Metric(ColumnSettings):
    """A metric of the server, or its mean, worst value or spread over clients, each after its last evaluation."""

    short_name: ClassVar[str] = "metric"

    metric: str = Field(description="its name, such as r1_sum or accuracy; of clients also primary, that of their task")
    of: str = Field(default=SERVER, description="server, a group of clients, or clients for all of them")
    over: Literal["mean", "worst", "best", "disparity", "std"] = Field(
        default="mean", description="statistic over a group"
    )
    kind: Literal["test", "validation", "train"] = Field(
        default="test", description="train: recorded by the server in its steps, such as teacher.r1_sum"
    )
    round: Literal["selected", "final", "best"] = Field(
        default="selected",
        description="the round that validation selects (the last without validation), the last, or the one with the "
        "highest value; for clients always the last",
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
        stem = self.metric.partition("_given_")[0]  # without the modalities of a subset of samples
        if all(task.metric_names for task in tasks) and stem not in names:  # else its data decide
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
                "of: the experiment has no server; name a group of clients, or leave the column out (null)"
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
        groups = records.groups if self.of == CLIENTS else {self.of: records.groups[self.of]}
        names = {  # client -> the metric that is its own
            client: run.experiment.clients[group].task.primary if self.metric == PRIMARY else self.metric
            for group, own in groups.items()
            for client in own
        }
        members = [client for client in records.clients if client in names]
        values = {client: self._figure(records.last(client, self.kind), names[client]) for client in members}
        if not (finite := finite_values(values)):
            raise ConfigError(self._unknown(run.name, [n for m in members for n in records.metric_names(m, self.kind)]))
        return float(getattr(ClientSpread(self.of, self.metric, finite, len(members)), self.over))

    def _figure(self, metrics: Mapping[str, float], name: str) -> float:
        return metrics.get(name, math.nan)

    def _of_server(self, records: RunRecords) -> float:
        if not (series := records.series(SERVER, self.metric, self.kind)):
            raise ConfigError(self._unknown(records.name, records.metric_names(SERVER, self.kind)))
        if self.round == "best":
            highest = records.best(SERVER, self.metric, self.kind)
            return series[max(series)] if highest is None else highest[1]
        chosen = self.round == "selected" and records.chosen.metric
        return series.get(records.chosen.number if chosen else max(series), math.nan)

    def _unknown(self, run: str, names: object) -> str:
        valid = nearest(self.metric, dict.fromkeys(names))  # type: ignore[call-overload]
        return f"metric: no participant '{self.of}' of run '{run}' has '{self.metric}' on {self.kind}; {valid}"


class MetricAt(Metric):
    """A metric of the server after one of many rounds: a point of its curve, without a run of that length."""

    short_name: ClassVar[str] = "metric_at"

    of: Literal["server"] = "server"
    round: Literal["selected"] = "selected"
    at: PositiveInt = Field(description="the round, one in which the server is measured")

    def require(self, experiment: Experiment) -> None:
        super().require(experiment)
        if self.at > experiment.run.rounds:
            raise ConfigError(f"at: {self.at}, but run.rounds is {experiment.run.rounds}; give a round that there is")

    def _of_server(self, records: RunRecords) -> float:
        return records.series(SERVER, self.metric, self.kind).get(self.at, math.nan)


class Chance(Metric):
    """Value of guessing on the same test items, whose galleries shrink where items lack a modality."""

    short_name: ClassVar[str] = "chance"
    is_outcome: ClassVar[bool] = False

    def _figure(self, metrics: Mapping[str, float], name: str) -> float:
        return chance_of(name, metrics)

    def _of_server(self, records: RunRecords) -> float:
        return chance_of(self.metric, records.last(SERVER, self.kind))


class Together(ColumnSettings):
    """The mean over kinds of participants of a percentage of each, for a choice based on all of them.

    With ``kind: validation`` the server's is of its validation samples. Clients are evaluated on one split, which then
    must not be ``test``: ``tuning.set`` gives candidates another (``clients.*.test_split: validation``).
    """

    short_name: ClassVar[str] = "together"

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
        """Metrics of each participant in the run."""
        present = {*experiment.clients, *([SERVER] if experiment.server else [])}
        return [[self._part(of, name) for name in names] for of, names in self.metrics.items() if of in present]

    def _part(self, of: str, name: str) -> Metric:
        if of != SERVER:
            return Metric(metric=name, of=of)
        return Metric(metric=name, kind=self.kind, round="best" if self.kind == "validation" else "selected")


class TimeTo(ColumnSettings):
    """Virtual seconds until a metric of the server first reached ``target``; NaN if it never did."""

    short_name: ClassVar[str] = "time_to"

    metric: str = Field(description="its name, such as r1_sum")
    target: float = Field(description="value to reach")
    kind: Literal["test", "validation"] = "test"
    lower: bool = True

    def require(self, experiment: Experiment) -> None:
        if isinstance(experiment.run.pace, Sync) and experiment.run.pace.clients is None:
            raise ConfigError("run.pace.clients is null, so that the run has no virtual time; set it to drawn")

    def measure(self, run: Run) -> float:
        values, spent = run.records.series(SERVER, self.metric, self.kind), self.spent(run)
        if not values:
            names = run.records.metric_names(SERVER, self.kind)
            raise ConfigError(f"metric: no '{self.metric}' of a server in '{run.name}'; {nearest(self.metric, names)}")
        return next((spent[number] for number, value in values.items() if value >= self.target), math.nan)

    def spent(self, run: Run) -> Mapping[int, float]:
        """Round -> cost until its end, round 0 included."""
        return {0: 0.0} | run.records.series(SERVER, "virtual_seconds", PACE)


class Gauge(ColumnSettings):
    """A figure, or a figure minus another, explained by ``reads``.

    NaN for a run whose method has no such part.
    """

    short_name: ClassVar[str] = "gauge"
    is_outcome: ClassVar[bool] = False

    shows: SerializeAsAny[ColumnSettings] = Field(description="the figure, any other column")
    minus: SerializeAsAny[ColumnSettings] | None = Field(default=None, description="a column to subtract")
    reads: str = Field(description="meaning and unit, in plain words")
    above: float | None = Field(default=None, description="from here up 'then' holds")
    below: float | None = Field(default=None, description="from here down 'then' holds")
    then: str = Field(default="", description="consequence beyond the limits, in plain words")
    digits: int = Field(default=1, ge=0, le=9)

    @field_validator("shows", "minus", mode="before")
    @classmethod
    def _column(cls, value: Any) -> Any:
        return named_column(value)

    @property
    def parts(self) -> list[ColumnSettings]:
        """The figure, and the subtracted one."""
        return [part for part in (self.shows, self.minus) if part is not None]

    @property
    def identity(self) -> dict[str, Any]:
        """Identity of the figures alone, as words and limits do not change them."""
        return {"name": self.component_name(), "parts": [part.identity for part in self.parts]}

    @property
    def in_words(self) -> str:
        """``percent of equal weights' entropy; from 99 up GCA cannot act``."""
        ways = {"up": self.above, "down": self.below}
        limits = [f"from {limit:g} {way}" for way, limit in ways.items() if limit is not None]
        return f"{self.reads}; {' and '.join(limits)} {self.then}" if limits else self.reads

    def is_beyond(self, value: float) -> bool:
        """True if a figure is beyond a limit, so that ``then`` holds."""
        return (self.above is not None and value >= self.above) or (self.below is not None and value <= self.below)

    def require(self, experiment: Experiment) -> None:
        for part in self.parts:
            part.require(experiment)

    @property
    def needs_models(self) -> bool:
        return any(part.needs_models for part in self.parts)

    def is_at_hand(self, folder: Path) -> bool:
        return all(part.is_at_hand(folder) for part in self.parts)

    def measure(self, run: Run) -> float:
        try:
            first, *second = (part.measure(run) for part in self.parts)
        except ConfigError:  # the method has no such part
            return math.nan
        return first - sum(second)


class Recorded(ColumnSettings):
    """A metric that the server recorded, mean over rounds, or the difference among several.

    ``mean`` in their own unit; ``spread``, standard deviation in percent of their mean (0: all alike); ``departure``,
    mean distance of each share of their sum from an equal share, in percent of that (0: all alike; 200 (1 - 1 / n): one
    of n has all).
    """

    short_name: ClassVar[str] = "recorded"
    is_outcome: ClassVar[bool] = False

    metric: str = Field(description="its name, such as teacher.r1_sum; * stands for any text, as in loss.*")
    over: Literal["mean", "spread", "departure"] = Field(default="mean", description="statistic over several")
    round: Literal["first", "last", "all"] = Field(default="all", description="rounds with a record")

    def measure(self, run: Run) -> float:
        records = run.records
        known = records.metric_names(SERVER, "train")
        series = [records.series(SERVER, name, "train") for name in known if fnmatchcase(name, self.metric)]
        if not series:
            valid = nearest(self.metric, known)
            raise ConfigError(f"metric: the server of '{run.name}' recorded no '{self.metric}'; {valid}")
        rounds = sorted({number for one in series for number in one})[_ROUNDS[self.round]]
        return fmean(self._figure([one[number] for one in series if number in one]) for number in rounds)

    def _figure(self, values: Sequence[float]) -> float:
        mean = fmean(values)
        if self.over == "mean":
            return mean
        if not mean:
            return math.nan
        if self.over == "spread":
            return 100 * pstdev(values) / abs(mean)
        return 100 * fmean(abs(value / mean - 1) for value in values)


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
    if (content := _saved(run.folder, asked, options)) is None:
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
