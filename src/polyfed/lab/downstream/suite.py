"""Suites: named tasks with their data, and the models of a run to test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, SerializeAsAny

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.settings import Settings, parse_settings
from polyfed.data.samples import Samples
from polyfed.data.source import Source
from polyfed.data.view import DataContext
from polyfed.federation.settings import DataSettings
from polyfed.lab.analysis.analysis import AnalysisResult
from polyfed.lab.downstream.probe import Bench, FrozenModel, Probe
from polyfed.models.model import Model, ModelSettings
from polyfed.reporting.tables import TextTable
from polyfed.runs.config_files import read_config
from polyfed.runs.opened import Run


class Suite(Settings):
    """Tasks by name, each a probe with its settings, and sources of data for them."""

    description: str = Field(default="", description="purpose of the suite")
    sources: dict[str, SerializeAsAny[Source]] = Field(
        default_factory=dict, description="name -> source, in addition to those of the run"
    )
    tasks: dict[str, SerializeAsAny[Probe]] = Field(min_length=1, description="name of the task -> probe")

    @classmethod
    def load(cls, name: str) -> Suite:
        """A suite of polyfed by name, or from a YAML file.

        Raises:
            ConfigError: The suite is unknown, or a setting is wrong; the message names the key.
        """
        if name in (own := suites()):
            with resources.as_file(resources.files("polyfed.presets") / "downstream" / f"{name}.yaml") as path:
                return parse_settings(cls, read_config(path))
        if Path(name).suffix not in (".yaml", ".yml") and not Path(name).is_file():
            raise ConfigError(f"no suite or file '{name}'; {nearest(name, own)}, or a YAML file")
        return parse_settings(cls, read_config(Path(name)))

    def only(self, task: str) -> Suite:
        """The suite with one task.

        Raises:
            ConfigError: The task is unknown.
        """
        if task not in self.tasks:
            raise ConfigError(f"task: the suite has no task '{task}'; {nearest(task, self.tasks)}")
        return self.model_copy(update={"tasks": {task: self.tasks[task]}})

    def over(self, data: DataSettings) -> DataSettings:
        """The sources of a run with those of the suite, which take precedence."""
        return data.model_copy(update={"sources": {**data.sources, **self.sources}})


def suites() -> tuple[str, ...]:
    folder = resources.files("polyfed.presets") / "downstream"
    return tuple(sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")))


def run_suite(
    subject: FrozenModel,
    suite: Suite,
    data: DataSettings,
    *,
    name: str = "suite",
    seed: int = 42,
    draws: int | None = None,
    on_task: Callable[[str], None] = lambda line: None,
) -> AnalysisResult:
    """Test a model in all suitable tasks of a suite; the others are listed with the reason.

    Args:
        subject: The model.
        suite: Tasks and sources.
        data: Further sources, and folders.
        name: Name of the suite, for records.
        seed: Seed of all draws.
        draws: Number of draws of all tasks; None as each task sets it.
        on_task: Receives the name of each task before it begins.

    Raises:
        ConfigError, DataError: A task's settings or data are wrong (before any work), or no task is suitable.
    """
    bench = Bench(subject, suite.over(data), seed, draws)
    reasons = {task: probe.unsuitable(bench) for task, probe in suite.tasks.items()}
    left_out = {task: reason for task, reason in reasons.items() if reason is not None}
    if not (todo := {task: probe for task, probe in suite.tasks.items() if task not in left_out}):
        task, reason = next(iter(left_out.items()))
        raise ConfigError(f"no task is suitable: {task}: {reason}; choose another suite or model")
    for task, probe in todo.items():  # all, before any of them works for minutes
        probe.check(bench, task)
    outcomes = {}
    for task, probe in todo.items():
        on_task(f"{task} ({probe.component_name()})")
        outcomes[task] = probe.run(bench, task)
    tasks, tables = {}, []
    for task, outcome in outcomes.items():
        probe_name = suite.tasks[task].component_name()
        rows = [row.to_json() for row in outcome.rows]
        tasks[task] = {"probe": probe_name, "data": outcome.data, "rows": rows, "notes": list(outcome.notes)}
        tables.append(outcome.table(f"{task} ({probe_name}, {outcome.data})"))
    if left_out:
        tables.append(TextTable("Left out", ("task", "why"), list(left_out.items())))
    about = {"subject": subject.name, "suite": name, "seed": seed}
    return AnalysisResult({**about, "tasks": tasks, "left_out": left_out}, tables)


class Opened(NamedTuple):
    """A model with its data settings and CPU threads."""

    subject: FrozenModel
    data: DataSettings
    threads: int


def opened_model(run: Run, which: str | None = None, client: str | None = None) -> Opened:
    """A model of a run, frozen, in evaluation mode, on its device.

    Args:
        run: The opened run.
        which: ``best``, ``last``, or a round, of the run's models; by default best if there is one.
        client: Id of a client to test its own model instead.

    Raises:
        ConfigError: Options contradict each other, or the client is unknown.
        RunError: The run has no model.
    """
    if client is None:
        server = run.server_model(which)
        title = f"{run.name}, {server.which} {server.kind} (round {server.round})"
        opened = _of_run(run, title, server.model, server.settings, server.context)
        server.warn_if_untrained()
        return opened
    if which not in (None, "last"):
        raise ConfigError(f"--model {which} is the server's; a client has only its last model")
    members = run.federation.members
    # where clients keep no model, the global one of the client's type
    if run.has_client_models:
        model, settings = run.client_model(client), run.client(client).model
        title = f"{run.name}, model of client {client} (round {run.clients[client][0]})"
    elif client not in members:
        raise ConfigError(f"no client '{client}' in '{run.folder}'; {nearest(client, members)}")
    else:
        client_type = next(name for name, each in run.types.items() if client in {info.id for info in each.clients})
        if client_type not in run.global_weights:
            raise ConfigError(
                f"clients of '{run.experiment.algorithm.component_name()}' keep no model in '{run.folder}', nor does "
                "the server for them; test the server's model"
            )
        model, settings = run.global_model(client_type), members[client].model
        title = f"{run.name}, global model of {client_type} (round {run.checkpoint.round})"
    return _of_run(run, title, model, settings, run.federation.data.context)


def _of_run(run: Run, title: str, model: Model, settings: ModelSettings, context: DataContext) -> Opened:
    """A model with the data of a run, and the test samples of its clients in the model's views."""

    @cache  # the samples are opened when a task needs them
    def client_tests() -> Mapping[str, Samples]:
        tests = {name: run.federation.test(member, settings) for name, member in run.federation.members.items()}
        return {name: samples for name, samples in tests.items() if samples is not None}

    experiment = run.experiment
    clients = client_tests if experiment.clients else None
    views = {modality: encoder.view for modality, encoder in settings.encoders.items()}
    subject = FrozenModel(title, model.to(run.place), views, context, experiment.run.evaluation_batch, clients)
    return Opened(subject, experiment.data, experiment.run.threads)
