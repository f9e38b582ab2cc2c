"""Fixtures that tests of several packages share."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import yaml
from hypothesis import settings

import checked_shapes  # before what it checks
from polyfed import Experiment, run
from polyfed.cli.main import main
from run_folders import write_run
from small_federations import tiny_experiment

_numbers = itertools.count()
pytest_plugins = ["forked"]
gc.disable()  # until all is collected
Cli = Callable[..., tuple[int, str, str]]
settings.register_profile("few", max_examples=20, deadline=None)
settings.register_profile("many", max_examples=100, deadline=None)  # of make test-all
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))
torch.set_num_threads(1)  # tests run in parallel; threads that wait for each other would only slow them


def pytest_collection_finish() -> None:
    """Takes what importing and collecting left out of the garbage collector's sight: a seventh of all time was its."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """A run leaves its process with as many threads as it is set to; the next test would wait for them."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def shapes_are_checked_anew() -> None:
    checked_shapes.calls.clear()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A new folder; pytest's own fixture reads the names of those of all earlier tests for the next number."""
    common = tmp_path_factory.getbasetemp() / "tests"
    folder = common / f"{os.getpid()}-{next(_numbers)}-{request.node.originalname[:40]}"
    folder.mkdir(mode=0o700, parents=True)
    return folder


@pytest.fixture
def unchecked_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong shapes reach the function, as they do outside the tests, for what it says of them itself."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Skips fsync: written files can be read without it; tests of a loss of power put their own in its place.

    Each run reads the versions of all packages, which stay as they are.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        patch.setattr("importlib.metadata.version", functools.cache(importlib.metadata.version))
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for all tests: training the default tokenizer alone takes longer than most runs here."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYFED_CACHE", str(folder))
        yield folder


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A complete experiment that runs in a second: 3 clients, 72 generated scenes, 2 rounds of FedAvg."""
    for variable in ("POLYFED_DATA", "POLYFED_WEIGHTS"):
        monkeypatch.delenv(variable, raising=False)
    return tiny_experiment()


@pytest.fixture
def three_groups(tiny: dict[str, Any]) -> dict[str, Any]:
    """``tiny`` with a text group next to the image-text and the image group, one round."""
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


@pytest.fixture(scope="session")
def made_up_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as it is written, with made-up results; not to be changed."""
    return write_run(tmp_path_factory.mktemp("made-up") / "run")


@pytest.fixture
def run_folder(made_up_run: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to be changed."""
    return Path(shutil.copytree(made_up_run, tmp_path / "run"))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of ``tiny``, without plots; not to be changed."""
    return _finished(tiny_experiment(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def copied(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to be changed."""
    return Path(shutil.copytree(tiny_run, tmp_path / "copy"))


@pytest.fixture(scope="session")
def classifier_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run whose server classifies images, without a public set; not to be changed."""
    content = tiny_experiment()
    private = content["clients"]["image"]
    server = {key: private[key] for key in ("model", "task", "source", "training")}
    content |= {"public": None, "server": server, "clients": {"image": private}}
    return _finished(content, tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="session")
def fedafd_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of FedAFD with the federation of ``tiny_run``; not to be changed."""
    content = yaml.safe_load((tiny_run / "config.yaml").read_text())
    content["algorithm"] = {"name": "fedafd", "local_epochs": 1}
    return run(Experiment.load(content), tmp_path_factory.mktemp("fedafd") / "run").folder


def _finished(content: dict[str, Any], folder: Path) -> Path:
    content["run"]["rounds"] = 1
    return run(Experiment.load(content), folder / "run").folder  # ``run.output.plots`` is false


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs a command in an empty folder; gives exit code, output and errors."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("polyfed.reporting.api.run_figures", lambda records: {})  # takes longer than all the rest

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
