"""Every run that the programs behind docs/results.md plan has a preset and settings that load."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from polyfed.runs.config_files import read_config
from polyfed.runs.experiment import Experiment

PROGRAMS = Path(__file__).parents[1] / "benchmarks" / "results"
OPTIONS = SimpleNamespace(set=[], seed=0, rounds=2, preset="fedcola-flickr8k-features")


@pytest.fixture
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module(request.param)


def runs_of(program: Any) -> Iterator[tuple[str, list[str]]]:
    """Preset and overrides of each row."""
    for planned in _PLANNED[program.__name__](program):
        yield planned.preset, list(planned.overrides)


def _medical(program: Any) -> Iterator[Any]:
    for table in program.TABLES.values():
        yield from table.values()


def _attackers(program: Any) -> Iterator[Any]:
    for row in program.ROWS.values():
        yield SimpleNamespace(preset=program.PRESET, overrides=row.overrides)
        yield SimpleNamespace(preset=program.PRESET, overrides=[*row.overrides, program.OFF])


def _tradeoff(program: Any) -> Iterator[Any]:
    config = read_config("exchange-creamfl")
    for samples, dtype in ((0, "float32"), (100, "int8")):
        point = program.Point(500, 64, samples, dtype)
        yield SimpleNamespace(preset="exchange-creamfl", overrides=point.overrides(config))


def _orderings(program: Any) -> Iterator[Any]:
    with TemporaryDirectory() as out:
        for preset in program.PRESETS.values():
            long = program.Long(Path(out), preset, 0.3)
            yield from long.final(dict.fromkeys(long.rows(), 0.001), 1, 2).values()


_PLANNED = {
    "attackers": _attackers,
    "exchange": lambda program: (program.planned(name, 0, 0.002, 2, OPTIONS, ()) for name in program.METHODS),
    "flickr8k": lambda program: program.planned(1, 1, 1, []),
    "malicious": lambda program: (
        program.planned(method, attack, OPTIONS) for method in program.METHODS for attack in program.ATTACKS
    ),
    "medical_tables": _medical,
    "orderings": _orderings,
    "tradeoff": _tradeoff,
    "transfer": lambda program: (program.planned(name, 0, 0.001, 2, OPTIONS) for name in program.METHODS),
    "vqa": lambda program: (program.planned(data, row, 0, ()) for data in program.SETS for row in program.ROWS),
}


@pytest.mark.parametrize("program", ["demo"], indirect=True)
def test_the_demo_is_compared_with_its_server_alone(program: Any, tmp_path: Path) -> None:
    plan = program.planned(tmp_path, program.rows(), "demo", (3, 4))
    alone, federation = (Experiment.load(row[0].preset) for row in plan)
    assert (alone.twin.kind, alone.twin.is_to_be_tuned, federation.twin) == ("server-only", True, None)
    assert (alone.server, alone.public, alone.run.rounds) == (
        federation.server,
        federation.public,
        federation.run.rounds,
    )
    # the second seed of the twin has what was chosen for the first
    assert plan[0][1].preset == str(tmp_path / plan[0][0].name / "config.yaml")


@pytest.mark.parametrize("program", sorted(_PLANNED), indirect=True)
def test_what_a_program_plans_loads(program: Any) -> None:
    wrong = {}
    for preset, overrides in runs_of(program):
        try:
            Experiment.load(PROGRAMS / preset if preset.endswith(".yaml") else preset, overrides)
        except Exception as error:
            wrong[f"{preset} {' '.join(overrides)}"] = str(error)
    assert not wrong
