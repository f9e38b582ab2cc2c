"""Clients that raise, are late, or whose process is killed: on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from struck_runs import ENGINES, events, ready, reasons, results

import polyfed
from polyfed import Experiment
from polyfed.core.errors import ExchangeError

Config = dict[str, Any]
ALL = ["local", pytest.param("ray", marks=pytest.mark.slow), pytest.param("flower", marks=pytest.mark.slow)]
PROCESSES = [name for name in ENGINES if name != "local"]
BACK = [(2, "image", "client_excluded"), (3, "image", "client_returned")]


@pytest.fixture(autouse=True)
def _cluster(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["engine"] != "local":
        request.getfixturevalue("ray_cluster")


@pytest.mark.slow
@pytest.mark.parametrize("engine", PROCESSES)  # the local one: tests/runs/test_runner_clients.py
def test_a_client_that_raises_is_excluded_with_its_traceback(keeping: Config, tmp_path: Path, engine: str) -> None:
    config = ready(keeping, tmp_path, engine, how="raise", evaluate_clients=False)
    folder = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True).folder
    assert events(folder) == BACK
    assert reasons(folder) == {"image": "ValueError: no GPU left"}
    text = (folder / "tracebacks.log").read_text()
    assert text.startswith("--- round 2, client image\n    Traceback (most recent call last):\n")
    assert 'raise ValueError("no GPU left")' in text


@pytest.mark.parametrize("engine", ALL)
def test_a_run_of_too_few_resumes(keeping: Config, undisturbed: dict[str, bytes], tmp_path: Path, engine: str) -> None:
    config = ready(keeping, tmp_path, engine, how="raise", exchange={"phases": {"fit": {"min_clients": 1.0}}})
    with pytest.raises(ExchangeError, match=r"round 2: 2 of 3 clients .*\(image: ValueError: no GPU left\)"):
        polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    assert results(polyfed.resume(tmp_path / "run", quiet=True).folder) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("engine", PROCESSES)
def test_killed_clients_are_redone(keeping: Config, undisturbed: dict[str, bytes], tmp_path: Path, engine: str) -> None:
    config = ready(keeping, tmp_path, engine, how="kill")
    folder = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True).folder
    assert (tmp_path / "counter").stat().st_size == 2  # killed once, then done
    assert results(folder) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("engine", PROCESSES)
def test_a_client_whose_process_is_always_killed_is_excluded(keeping: Config, tmp_path: Path, engine: str) -> None:
    config = ready(keeping, tmp_path, engine, how="kill", times=100, evaluate_clients=False)
    folder = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True).folder
    assert events(folder) == BACK
    assert "run.engine.retries is 2" in reasons(folder)["image"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", PROCESSES)
def test_a_client_that_hangs_is_late(keeping: Config, tmp_path: Path, engine: str) -> None:
    settings: Config = {"evaluate_clients": False, "exchange": {"phases": {"fit": {"deadline": 25.0}}}}
    config = ready(keeping, tmp_path, engine, how="sleep", **settings)
    folder = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True).folder
    assert events(folder)[0] == BACK[0]
    assert reasons(folder) == {"image": "no answer within 25 s"}
