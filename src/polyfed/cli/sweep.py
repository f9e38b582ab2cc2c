"""``polyfed run --sweep``: the study of an experiment at several values of its settings."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from polyfed.core.errors import ConfigError, PolyfedError
from polyfed.core.moved import moved_path
from polyfed.core.untrusted import yaml_content
from polyfed.lab.studies.study_files import setting_label
from polyfed.runs.config_files import config_text, override_in
from polyfed.runs.experiment import Experiment

FILE = "sweep.yaml"
_FIXED = ("run.seed", "run.threads", "run.output.plots")


def run_sweep(
    source: str, experiments: Sequence[Experiment], overrides: Sequence[str], sweep: Sequence[str], folder: Path
) -> None:
    """Write a study of an experiment over a grid of settings into a new folder, run it, and print its table.

    Args:
        source: Preset, or file of the experiment.
        experiments: The experiment with the overrides, with each seed.
        overrides: ``path.to.key=value`` of all runs.
        sweep: ``path.to.key=value,value`` of each axis.
        folder: Folder of the study.

    Raises:
        ConfigError: A setting or a value is wrong; nothing is written then.
    """
    from polyfed.cli.study import study_run
    from polyfed.core.settings import parse_settings
    from polyfed.lab.studies.cells import Places, StudyPlan, require_data
    from polyfed.lab.studies.study import Study
    from polyfed.runs.carried import with_round

    if folder.exists():
        raise ConfigError(f"--out {folder}: exists; choose another, or go on with a study by polyfed study run")
    experiment, common = experiments[0], dict(map(override_in, overrides))
    if (initial := with_round(experiment).initial) is not None:  # part of the identity of a cell
        common["initial.round"] = initial.round
    axes = axes_of(sweep, common)
    content = {
        "title": f"{experiment.name}: {', '.join(axes)}",
        "base": str(Path(source).resolve()) if Path(source).is_file() else source,
        "set": {path: value for path, value in common.items() if path != "run.seed"},
        "seeds": [one.run.seed for one in experiments],
        "rows": {experiment.name: {}},
        "columns": {**_metrics(experiment), "MiB": {"name": "traffic"}},
        "axes": {path: {"setting": path, "values": values} for path, values in axes.items()},
    }
    try:
        plan = StudyPlan(parse_settings(Study, content), Places(), folder.parent)
        for row, point in plan.row_points():
            require_data(plan.check(row, point))
    except PolyfedError as error:
        raise ConfigError(f"--sweep {' --sweep '.join(sweep)}: {error}") from error
    folder.mkdir(parents=True)
    if Path(source).is_file():  # so that both can be moved together
        content["base"] = os.path.relpath(source, folder)
    file = folder / FILE
    file.write_text(config_text(content), encoding="utf-8")
    try:
        study_run(file, out=folder)
    finally:
        again = f"polyfed study run {shlex.quote(str(file))} --out {shlex.quote(str(folder))}"
        typer.echo(f"the same study again, or with more seeds or rows in its file: {again}")


def axes_of(sweep: Sequence[str], common: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Maps paths of settings to the values of a sweep.

    Args:
        sweep: ``path.to.key=value,value`` of each axis.
        common: Settings of all runs by path.

    Raises:
        ConfigError: An axis is not of that form, has one value, a value twice, or is set otherwise.
    """
    axes = dict[str, list[Any]]()
    for text in sweep:
        name, sign, given = text.partition("=")
        path = moved_path(name)
        if not (name and sign):
            raise ConfigError(f"--sweep {text}: needs the form KEY=VALUE,VALUE")
        try:
            values = list(yaml_content(f"[{given}]"))
        except ValueError as error:
            raise ConfigError(f"--sweep {text}: not values of YAML with ',' between them: {error}") from error
        if len(values) < 2:
            raise ConfigError(f"--sweep {text}: give two values or more, as {name}=0.1,0.3; --set sets one")
        labels = list(map(setting_label, values))
        if double := [label for number, label in enumerate(labels) if label in labels[:number]]:
            raise ConfigError(f"--sweep {text}: has {double[0]} twice; give each value once")
        for other in (*_FIXED, *common, *axes):
            if f"{other}.".startswith(f"{path}."):
                by = "a study (seeds are --seeds 0,1,2)" if other in _FIXED else "another option; give one of them"
                raise ConfigError(f"--sweep {text}: {other} is set by {by}")
        axes[path] = values
    return axes


def _metrics(experiment: Experiment) -> dict[str, Any]:
    """Columns of the metric by which the server's task selects models, or without a server the clients' tasks."""
    if experiment.server is not None:
        return {experiment.server.task.primary: {"metric": experiment.server.task.primary}}
    primary = {name: group.task.primary for name, group in experiment.clients.items()}
    if len({*primary.values()}) == 1:
        primary = {"clients": next(iter(primary.values()))}
    return {f"{name} {metric}": {"metric": metric, "of": name} for name, metric in primary.items()}
