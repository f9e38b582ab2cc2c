"""The machinery of the least run stays small."""

from __future__ import annotations

from traced import machinery

MOST = 2_800
"""Lines of polyfed that FedAvg with two clients enters, without data, models, tasks, losses, optimisers and reports."""


def test_the_least_run_enters_few_lines() -> None:
    figures = machinery()
    assert {"federation", "runs", "engines", "wire"} <= figures.keys()
    assert sum(figures.values()) <= MOST, figures
