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

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def make_bench(tmp_path: Path) -> Callable[..., Bench]:
    return partial(bench_in, tmp_path)


@pytest.fixture
def cli(cli: Cli) -> Cli:
    """Runs ``polyfed downstream ...`` in an empty folder; gives exit code, output and errors."""
    return partial(cli, "downstream")


def _finished(tiny_run: Path, folder: Path, **changes: Any) -> Path:
    content = yaml.safe_load((tiny_run / "config.yaml").read_text()) | {"server": None} | changes
    return polyfed.run(Experiment.load(content), folder).folder


@pytest.fixture(scope="session")
def local_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of clients that keep their models, without a server; not to be changed."""
    return _finished(tiny_run, tmp_path_factory.mktemp("local") / "run", algorithm="local")


@pytest.fixture(scope="session")
def typed_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of FedAvg without a server model: the weights are those of types; likewise."""
    return _finished(tiny_run, tmp_path_factory.mktemp("typed") / "run")
