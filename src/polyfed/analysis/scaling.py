"""Scaling: what the server gains as more groups of clients, with more data sets, join (FedCola, section 6.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.analysis.results import spread_json
from polyfed.analysis.series import Found, Told, carry_out, plan, primary_metric, require_groups, without
from polyfed.core.errors import ConfigError
from polyfed.reporting.compare import Spread
from polyfed.runs.experiment import Experiment

Steps = Sequence[Sequence[str]]
"""What joins at each step: one group, or several at once (FedCola: an image and a text data set)."""


def scaling_experiments(experiment: Experiment, steps: Steps) -> dict[str, Experiment]:
    """The experiments with 0, 1, 2, ... of the steps; groups that no step names take part in all.

    Returns:
        Label (``0-none``, ``1-<groups of step 1>``, ...) -> experiment.

    Raises:
        ConfigError: a step is empty or names no group, or no client would be left before the first step.
    """
    if not all(steps):
        raise ConfigError(f"groups: step {[bool(step) for step in steps].index(False) + 1} names no group")
    require_groups(experiment, [name for step in steps for name in step], "groups")
    labels = ["0-none", *(f"{number}-{'+'.join(step)}" for number, step in enumerate(steps, start=1))]
    missing = [[name for step in steps[number:] for name in step] for number in range(len(steps) + 1)]
    return {label: without(experiment, left_out, label) for label, left_out in zip(labels, missing, strict=True)}


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
    values: Found

    @property
    def spreads(self) -> list[Spread]:
        """Mean and standard deviation over seeds with 0, 1, 2, ... steps."""
        return [Spread.of(list(by_seed.values())) for by_seed in self.values.values()]

    def to_json(self) -> dict[str, Any]:
        """All of it, with mean and spread over seeds."""
        return {
            "metric": self.metric,
            "steps": [list(step) for step in self.steps],
            "values": {label: spread_json(by_seed) for label, by_seed in self.values.items()},
        }


def scaling(
    experiment: Experiment, steps: Steps, seeds: Sequence[int], out: Path, told: Told = lambda line: None
) -> Scaling:
    """Run the experiment with 0, 1, 2, ... steps and every seed below ``out``; what is complete is not run again.

    Raises:
        ConfigError, RunError: before any run, if one of them is impossible.
    """
    found = carry_out(plan(scaling_experiments(experiment, steps), seeds, out), told)
    return Scaling(primary_metric(experiment), tuple(tuple(step) for step in steps), found)
