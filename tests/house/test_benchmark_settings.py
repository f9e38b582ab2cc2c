"""Presets and settings of benchmarks load, and their driver makes tables of their lines."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from polyfed.algorithms.algorithm import Algorithm
from polyfed.runs.experiment import Experiment

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch):
    """A benchmark as a module."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module


def test_every_case_of_bits_loads_and_every_method_has_one(program) -> None:
    bits = program("bits")
    used = set()
    for preset, overrides in bits.CASES.values():
        experiment = Experiment.load(preset, (*bits.RUN, *overrides))
        assert experiment.aggregation.clip is None
        used.add(experiment.algorithm.component_name())
    assert used == set(Algorithm.available())


def test_every_cell_of_the_table_on_leakage_loads(program) -> None:
    leakage = program("leakage")
    for changes in leakage.PROTECTIONS.values():
        assert Experiment.parse(leakage.federation(0) | changes).algorithm.component_name() == "fedavg"


def test_plans_name_benchmarks_that_exist(program) -> None:
    for plan in program("all").PLANS.values():
        assert not [name for name in plan if not (PROGRAMS / f"{name.split()[0]}.py").is_file()]


def test_one_plan_has_every_benchmark_that_needs_no_gpu(program) -> None:
    measuring = {path.stem for path in PROGRAMS.glob("*.py") if "harness.report(" in path.read_text()} - {"gpu"}
    assert {name.split()[0] for name in program("all").PLANS["whole"]} == measuring


BENCHMARK = """
import sys, harness
harness.report("small", ratio=1.1, against="a rival", limit=1.25)
harness.report("fast", ratio=3.0, against="a rival", limit=4.0, better="larger")
harness.report("free", ratio=2.0, against="a rival")
harness.lacking("a folder")
sys.exit("no data")
"""


def test_the_table_marks_figures_outside_their_limits_and_failures(program, monkeypatch, tmp_path, capsys) -> None:
    driver = program("all")
    (tmp_path / "made.py").write_text(BENCHMARK)
    monkeypatch.setattr(driver, "HERE", tmp_path)
    monkeypatch.setattr(driver, "PLANS", {"whole": ["made"]})
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    monkeypatch.setattr("sys.argv", ["all.py", "--record", str(tmp_path / "record.json")])
    assert driver.main() == 1
    rows = {" ".join(line.split()) for line in capsys.readouterr().out.split("figure ")[1].splitlines()}
    assert {"small 1.1 <= 1.25 within a rival", "fast 3 >= 4 OUTSIDE a rival", "free 2 no limit a rival"} <= rows
    assert {"made LACKS a folder", "made FAILED no data"} <= rows
    kept = json.loads((tmp_path / "record.json").read_text())
    assert [figure["within"] for figure in kept["benchmarks"][0]["figures"]] == [True, False, None]
    assert kept["benchmarks"][0]["failed"]


@pytest.mark.slow
def test_measurements_of_a_gpu_run_on_the_cpu(program, capsys) -> None:
    gpu = program("gpu")
    setup = gpu.Setup(
        "cpu", {"FedAvg": "transfer-fedavg"}, gpu.federations.image_model(8, 8), {"FedAvg": ("transfer-fedavg", ())}, 1
    )
    for measure in gpu.PARTS.values():
        measure(setup)
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [one["ratio"] for one in figures if "apart" in one["name"]] == [0.0, 0.0]
    assert len(figures) == 12


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_benchmark_is_one_line(program, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr("sys.argv", ["all.py", "--plan", "gpu", "--record", str(tmp_path / "record.json")])
    assert program("all").main() == 0
    assert capsys.readouterr().out == "gpu: not measured: lacks a GPU that PyTorch can use\n"
    assert not any(tmp_path.iterdir())
