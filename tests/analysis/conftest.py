from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyfed import Experiment
from polyfed.core.randomness import derive_seed
from polyfed.reporting.reported import run as run_experiment
from polyfed.runs.folder import RunFolder

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw nothing, which takes longer than all the rest; analyses do."""
    monkeypatch.setattr("polyfed.reporting.reported.draw_all", lambda records: None)


@pytest.fixture
def analyse(cli: Cli) -> Cli:
    """Runs ``polyfed analyse ...`` in an empty folder; gives exit code, output and errors."""
    return partial(cli, "analyse")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tiny_run: Path) -> list[str]:
    """Names of the run folders that a series starts, in order; nothing is trained, and metrics are made up."""
    folders: list[str] = []

    def finished(experiment: Experiment, folder: Path) -> None:
        folders.append(folder.name)
        RunFolder(folder).begin("made up", experiment.to_yaml(), {}, {})
        shutil.copytree(tiny_run / "checkpoints", folder / "checkpoints")
        metrics = {"r1_sum": derive_seed(folder.name) % 10_000 / 100}
        line = {"round": 1, "participant": "server", "kind": "test", "metrics": metrics}
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")

    monkeypatch.setattr("polyfed.analysis.series.run", finished)
    return folders


@pytest.fixture
def three_groups(tiny: dict[str, Any]) -> dict[str, Any]:
    """``tiny`` with a text group beside the image-text and the image group, one round."""
    image = tiny["clients"]["image"]
    text = tiny["server"]["model"]["encoders"]["text"]
    sources = tiny["data"]["sources"]
    sources["texts"] = {**sources["private"], "seed": 2, "columns": {"text": "text"}, "targets": {"topic": "topic"}}
    tiny["clients"]["text"] = {
        **image,
        "source": "texts",
        "task": {"name": "classification", "target": "topic"},
        "model": {"dim": 8, "encoders": {"text": text}},
    }
    tiny["run"] |= {"rounds": 1, "evaluate_clients": False}
    return tiny


def _layered(run_folder: Path) -> dict[str, Any]:
    """The federation of ``tiny_run`` with encoders that have layers, and clients with tests of their own."""
    content = dict(yaml.safe_load((run_folder / "config.yaml").read_text()))
    words = {"name": "transformer", "width": 8, "layers": 2, "heads": 2, "view": {"name": "tokens", "length": 16}}
    for model in (content["server"]["model"], content["clients"]["paired"]["models"][0]):
        model["encoders"]["text"] = words
    content["data"]["sources"]["scenes"]["test"] = 40
    content["clients"]["paired"]["test"] = "dealt"
    content["run"] |= {"rounds": 1, "evaluate_clients": False}
    return content


def _finished(content: dict[str, Any], folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyfed.reporting.reported.draw_all", lambda records: None)  # takes longer than all the rest
        return run_experiment(Experiment.load(content), folder).folder


@pytest.fixture(scope="session")
def fedavg_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of FedAvg whose encoders have layers; not to be changed."""
    return _finished(_layered(tiny_run), tmp_path_factory.mktemp("layered") / "run")


@pytest.fixture(scope="session")
def local_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of local training, whose clients keep models; not to be changed."""
    content = _layered(tiny_run) | {"algorithm": {"name": "local", "local_epochs": 1}}
    return _finished(content, tmp_path_factory.mktemp("local") / "run")
