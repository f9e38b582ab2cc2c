"""Every run that the programs on attackers plan has a preset and settings that load."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyfed.runs.experiment import Experiment

PROGRAMS = Path(__file__).parents[2] / "benchmarks" / "attackers"
OPTIONS = SimpleNamespace(set=[], seed=0, rounds=2)


@pytest.fixture
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module(request.param)


def _attackers(program: Any) -> Iterator[tuple[str, list[str]]]:
    for row in program.ROWS.values():
        yield program.PRESET, row.overrides
        yield program.PRESET, [*row.overrides, program.OFF]


def _malicious(program: Any) -> Iterator[tuple[str, list[str]]]:
    for method in program.METHODS:
        for attack in program.ATTACKS:
            run = program.planned(method, attack, OPTIONS)
            yield run.preset, run.overrides


_PLANNED = {"attackers": _attackers, "malicious": _malicious}


def test_presets_whose_runs_are_timed_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS.parent))
    cases = importlib.import_module("before_after").CASES
    assert len(cases) == 12
    for preset, algorithm in cases.values():
        chosen = Experiment.load(preset, [f"algorithm={algorithm}"] if algorithm else []).algorithm
        assert chosen.component_name() in (algorithm or chosen.component_name())


@pytest.mark.parametrize("program", sorted(_PLANNED), indirect=True)
def test_what_a_program_plans_loads(program: Any) -> None:
    wrong = {}
    for preset, overrides in _PLANNED[program.__name__](program):
        try:
            Experiment.load(preset, overrides)
        except Exception as error:
            wrong[f"{preset} {' '.join(overrides)}"] = str(error)
    assert not wrong


def test_every_cell_of_the_table_on_leakage_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS.parent))
    program = importlib.import_module("leakage")
    for method in program.KINDS:
        for changes in program.protected(method).values():
            assert Experiment.parse(program.federation(method, 0) | changes).algorithm.component_name() == method
