from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import polyfed
from benches import bench_in
from polyfed import Experiment
from polyfed.lab.downstream.probe import Bench


def _layered(run_folder: Path) -> dict[str, Any]:
    """The federation of ``tiny_run`` with encoders that have layers, and clients with tests of their own."""
    content = dict(yaml.safe_load((run_folder / "config.yaml").read_text()))
    words = {"name": "bert", "view": {"name": "tokens", "length": 16}}
    for model in (content["server"]["model"], content["clients"]["paired"]["models"][0]):
        model["encoders"]["text"] = words
    content["data"]["sources"]["scenes"]["test"] = 40
    content["clients"]["paired"]["test"] = "dealt"
    content["run"] |= {"rounds": 1, "evaluate_clients": False}
    return content


def _finished(content: dict[str, Any], folder: Path) -> Path:
    return polyfed.run(Experiment.load(content), folder).folder  # ``run.output.plots`` is false


@pytest.fixture(scope="session")
def fedavg_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of FedAvg whose encoders have layers; not to be changed."""
    return _finished(_layered(tiny_run), tmp_path_factory.mktemp("layered") / "run")


@pytest.fixture(scope="session")
def local_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of local training, whose clients keep models; not to be changed."""
    content = _layered(tiny_run) | {"algorithm": {"name": "local", "local_epochs": 1}}
    return _finished(content, tmp_path_factory.mktemp("local") / "run")


@pytest.fixture
def make_bench(tmp_path: Path) -> Callable[..., Bench]:
    return partial(bench_in, tmp_path)
