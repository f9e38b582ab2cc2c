"""Suites: named tasks with the data that they need, from a YAML file or of those that come with polyfed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from pydantic import Field, SerializeAsAny

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.settings import Settings, parse_settings
from polyfed.data.source import Source
from polyfed.federation.settings import DataSettings
from polyfed.lab.analysis.analysis import AnalysisResult
from polyfed.lab.downstream.bench import Bench, FrozenModel
from polyfed.lab.downstream.probe import Probe
from polyfed.lab.downstream.results import suite_result
from polyfed.runs.config_files import read_config


class Suite(Settings):
    """Tasks by name, each a probe with its settings, and sources of data for them."""

    description: str = Field(default="", description="what it tests")
    sources: dict[str, SerializeAsAny[Source]] = Field(
        default_factory=dict, description="name -> source; those of the run are there too, under their names"
    )
    tasks: dict[str, SerializeAsAny[Probe]] = Field(min_length=1, description="name of the task -> probe")

    @classmethod
    def load(cls, name: str) -> Suite:
        """A suite of polyfed's own by name, or from a YAML file.

        Raises:
            ConfigError: there is none of that name, or a setting is wrong; the message names the key.
        """
        if name in (own := suites()):
            with resources.as_file(resources.files("polyfed.presets") / "downstream" / f"{name}.yaml") as path:
                return parse_settings(cls, read_config(path))
        if Path(name).suffix not in (".yaml", ".yml") and not Path(name).is_file():
            raise ConfigError(f"no suite or file '{name}'; {nearest(name, own)}, or a YAML file")
        return parse_settings(cls, read_config(Path(name)))

    def chosen(self, names: Sequence[str] | None) -> Suite:
        """The suite with these tasks only, in their order.

        Raises:
            ConfigError: it has no such task.
        """
        for name in names or ():
            if name not in self.tasks:
                raise ConfigError(f"--tasks: the suite has no task '{name}'; {nearest(name, self.tasks)}")
        return self if names is None else self.model_copy(update={"tasks": {name: self.tasks[name] for name in names}})

    def over(self, data: DataSettings) -> DataSettings:
        """The sources of a run with those of the suite, which win."""
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
    tell: Callable[[str], None] = lambda line: None,
) -> AnalysisResult:
    """Test a model in all tasks of a suite that suit it; the others are listed with the reason.

    Args:
        subject: the model.
        suite: tasks and sources.
        data: further sources, and folders.
        name: of the suite, for records.
        seed: what all draws derive from.
        draws: overrides the number of draws of all tasks.
        tell: is given the name of each task before it is done.

    Raises:
        ConfigError, DataError: a task's settings or data are wrong (found before any work), or none suits.
    """
    bench = Bench(subject, suite.over(data), seed, draws)
    reasons = {task: probe.unsuitable(bench) for task, probe in suite.tasks.items()}
    left_out = {task: reason for task, reason in reasons.items() if reason is not None}
    todo = {task: probe for task, probe in suite.tasks.items() if task not in left_out}
    if not todo:
        task, reason = next(iter(left_out.items()))
        raise ConfigError(f"no task suits: {task}: {reason}; choose another suite or model")
    for task, probe in todo.items():  # all, before any of them works for minutes
        probe.check(bench, task)
    outcomes = {}
    for task, probe in todo.items():
        tell(f"{task} ({probe.component_name()})")
        outcomes[task] = probe.run(bench, task)
    kinds = {task: probe.component_name() for task, probe in suite.tasks.items()}
    return suite_result({"subject": subject.name, "suite": name, "seed": seed}, kinds, outcomes, left_out)
