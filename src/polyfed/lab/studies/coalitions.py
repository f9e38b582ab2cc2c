"""One experiment with some of its client groups at a time, over several seeds: a study of one column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.errors import ConfigError, RunError, nearest
from polyfed.core.settings import parse_settings
from polyfed.lab.studies.runner import OnProgress
from polyfed.lab.studies.session import run_study
from polyfed.lab.studies.study import Study
from polyfed.reporting.compare import Spread
from polyfed.runs.experiment import Experiment

BySeed = dict[str, dict[int, float]]
"""Label of a coalition -> seed -> the server's primary test metric after the last round."""


def primary_metric(experiment: Experiment) -> str:
    """The primary metric of the server's task, by which coalitions are judged.

    Raises:
        ConfigError: there is no server model.
    """
    if experiment.server is None:
        raise ConfigError(f"'{experiment.name}' has no server model to judge runs by; add a 'server' section")
    return experiment.server.task.primary


def require_groups(experiment: Experiment, names: Sequence[str], option: str) -> None:
    """Raise ConfigError unless ``names`` are different groups of the experiment, at least one."""
    if not names:
        raise ConfigError(f"{option} names no group; {nearest('', experiment.clients)}")
    for name in names:
        if name not in experiment.clients:
            raise ConfigError(f"{option}: no group '{name}' under 'clients'; {nearest(name, experiment.clients)}")
        if names.count(name) > 1:
            raise ConfigError(f"{option}: '{name}' is named {names.count(name)} times; name it once")


def others(experiment: Experiment, left_out: Sequence[str]) -> list[str]:
    """The groups that stay; what their clients hold does not change, as partitions are drawn for each group.

    Raises:
        ConfigError: none would be left.
    """
    kept = [name for name in experiment.clients if name not in left_out]
    if not kept:
        raise ConfigError(
            f"without {', '.join(left_out)} no client is left, and a run needs one; name fewer groups, "
            "so that at least one always takes part"
        )
    return kept


def coalition_study(
    experiment: Experiment, coalitions: Mapping[str, Sequence[str]], seeds: Sequence[int], title: str
) -> Study:
    """A row for each coalition: label -> the groups that take part.

    Raises:
        ConfigError: there is no server model, or seeds are not different numbers.
    """
    metric = primary_metric(experiment)
    content = {
        "title": f"{experiment.name}: {title}",
        "base": experiment.model_dump(mode="json"),
        "seeds": list(seeds),
        "rows": {label: {"groups": list(groups)} for label, groups in coalitions.items()},
        "columns": {metric: {"name": "metric", "metric": metric, "round": "final"}},
    }
    return parse_settings(Study, content)


def final_values(study: Study, out: Path, listener: OnProgress = lambda progress: None) -> BySeed:
    """Run what is missing of it in ``out``.

    Raises:
        ConfigError, DataError: before any run, if one of them is impossible.
        RunError: a run failed; the others are kept.
    """
    done = run_study(study, out, listener=listener)
    ended, results = done.ended, done.results
    if causes := [*ended.failures.items(), *results.causes.items(), *((ended.stopped, "") for _ in ended.stopped[:1])]:
        label, cause = causes[0]
        raise RunError(f"{label}: {cause}; the same command goes on" if cause else label)
    (column,) = study.columns
    return {row: dict(results.at(row, (), column)) for row in study.rows}


def spreads_of(values: BySeed) -> dict[str, Spread]:
    return {label: Spread.of(list(by_seed.values())) for label, by_seed in values.items()}


def by_seed_json(values: BySeed) -> dict[str, Any]:
    """Label -> mean, standard deviation (NaN for one seed) and the value of every seed."""
    return {
        label: {"mean": spread.mean, "std": spread.std, "by_seed": {str(k): v for k, v in values[label].items()}}
        for label, spread in spreads_of(values).items()
    }
