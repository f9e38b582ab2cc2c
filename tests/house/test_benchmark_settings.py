"""Presets and settings of benchmarks load."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from polyfed.runs.experiment import Experiment

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


def test_presets_whose_runs_are_timed_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    cases = importlib.import_module("before_after").CASES
    assert len(cases) == 12
    for preset, algorithm in cases.values():
        chosen = Experiment.load(preset, [f"algorithm={algorithm}"] if algorithm else []).algorithm
        assert chosen.component_name() in (algorithm or chosen.component_name())


def test_every_cell_of_the_table_on_leakage_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    program = importlib.import_module("leakage")
    for method in program.KINDS:
        for changes in program.protected(method).values():
            assert Experiment.parse(program.federation(method, 0) | changes).algorithm.component_name() == method
