"""Scaling: what the server gains as more groups of clients, with more data sets, join (FedCola, section 6.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import ConfigError
from polyfed.lab.analysis.drawing import whiskers
from polyfed.lab.studies.coalitions import (
    BySeed,
    by_seed_json,
    coalition_study,
    final_values,
    others,
    primary_metric,
    require_groups,
    spreads_of,
)
from polyfed.lab.studies.runner import OnProgress
from polyfed.reporting.figures import COLOURS, GREY, figure_grid, styled
from polyfed.reporting.tables import TextTable
from polyfed.runs.experiment import Experiment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Steps = Sequence[Sequence[str]]
"""What joins at each step: one group, or several at once (FedCola: an image and a text data set)."""


def scaling_coalitions(experiment: Experiment, steps: Steps) -> dict[str, list[str]]:
    """Who takes part in 0, 1, 2, ... of the steps; groups that no step names are in all.

    Returns:
        Label (``0-none``, ``1-<groups of step 1>``, ...) -> groups.

    Raises:
        ConfigError: a step is empty or names no group, or no client would be left before the first step.
    """
    if not all(steps):
        raise ConfigError(f"groups: step {[bool(step) for step in steps].index(False) + 1} names no group")
    require_groups(experiment, [name for step in steps for name in step], "groups")
    labels = ["0-none", *(f"{number}-{'+'.join(step)}" for number, step in enumerate(steps, start=1))]
    # the runs differ in what is left out, so that groups that no step names are in all of them
    missing = [[name for step in steps[number:] for name in step] for number in range(len(steps) + 1)]
    return {label: others(experiment, left_out) for label, left_out in zip(labels, missing, strict=True)}


@dataclass(frozen=True)
class Scaling:
    """What the server reaches with so many steps.

    Attributes:
        metric: the server's primary test metric, after the last round.
        steps: groups that join at each step.
        values: label -> seed -> metric, one more entry than there are steps.
    """

    metric: str
    steps: tuple[tuple[str, ...], ...]
    values: BySeed

    def to_json(self) -> dict[str, Any]:
        return {"metric": self.metric, "steps": self.steps, "values": by_seed_json(self.values)}


def run_scaling(
    experiment: Experiment,
    steps: Steps,
    seeds: Sequence[int],
    out: Path,
    listener: OnProgress = lambda progress: None,
) -> Scaling:
    """Run the experiment with 0, 1, 2, ... steps and every seed, as the study in ``out``.

    Raises:
        ConfigError, DataError: before any run, if one of them is impossible.
        RunError: a run failed.
    """
    study = coalition_study(experiment, scaling_coalitions(experiment, steps), seeds, "more groups of clients")
    values = final_values(study, out, listener)
    return Scaling(primary_metric(experiment), tuple(map(tuple, steps)), values)


def scaling_table(scaled: Scaling) -> TextTable:
    """The metric with 0, 1, 2, ... steps, and what each step changed."""
    joined = ["none", *(" and ".join(step) for step in scaled.steps)]
    spreads = list(spreads_of(scaled.values).values())
    changes = ["", *(f"{after.mean - before.mean:+,.2f}" for before, after in pairwise(spreads))]
    rows = [
        (f"{number}: {name}", str(spread), change)
        for number, (name, spread, change) in enumerate(zip(joined, spreads, changes, strict=True))
    ]
    return TextTable("More groups of clients", ("that joined", scaled.metric, "change"), rows)


@styled
def draw_scaling(scaled: Scaling) -> Figure:
    """Mean of the metric by number of steps, its standard deviation, and every seed."""
    drawing, (axes,) = figure_grid(1, 1, title=f"More groups of clients: {scaled.metric}")
    spreads = list(spreads_of(scaled.values).values())
    means = [spread.mean for spread in spreads]
    axes.errorbar(range(len(means)), means, yerr=whiskers(spreads), color=COLOURS[0], marker="o", capsize=4)
    for number, by_seed in enumerate(scaled.values.values()):
        axes.plot([number] * len(by_seed), list(by_seed.values()), ".", color=GREY, markersize=5)
    axes.set_xticks(range(len(means)), ["none", *("+ " + " and ".join(step) for step in scaled.steps)])
    axes.tick_params(axis="x", rotation=20)
    axes.set(xlabel="groups that joined", ylabel=scaled.metric)
    return drawing
