"""Federations to hurt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from fake_grid import FakeMessage
from federations_in_process import InProcess
from struck_runs import results

import polyfed
from polyfed import Experiment
from polyfed.deploy.engines import flower_grid

_LEFT: dict[str, bytes] = {}


@pytest.fixture
def keeping(tiny: dict[str, Any]) -> dict[str, Any]:
    """The tiny experiment with a method whose clients keep models, optimisers and representations."""
    return keeping_from(tiny)


@pytest.fixture(scope="module")
def keeping_config(tiny_run: Path) -> dict[str, Any]:
    """The same for several tests, with what the run before it has cached."""
    return keeping_from(Experiment.load(tiny_run / "config.yaml").model_dump(mode="json"))


def keeping_from(tiny: dict[str, Any]) -> dict[str, Any]:
    """CreamFL for three rounds; a third of the scenes is private."""
    tiny["data"]["sources"]["scenes"]["train"] = 24
    algorithm = {"name": "creamfl", "local_epochs": 1, "contrast": {"batch_size": 16}}
    return tiny | {"algorithm": algorithm, "run": tiny["run"] | {"rounds": 3}}


@pytest.fixture
def undisturbed(keeping: dict[str, Any], tmp_path: Path) -> dict[str, bytes]:
    """Results of an undisturbed run of ``keeping`` on the local engine; made once."""
    if not _LEFT:
        _LEFT.update(results(polyfed.run(Experiment.parse(keeping), tmp_path / "undisturbed", quiet=True).folder))
    return _LEFT


@pytest.fixture
def grid_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that can be made outside a run of Flower's."""
    monkeypatch.setattr(flower_grid, "Message", FakeMessage)


@pytest.fixture
def federation(keeping: dict[str, Any], tmp_path: Path, grid_messages: None) -> InProcess:
    """Two sites, one of two clients, whose server and nodes are this process."""
    return InProcess.made(tmp_path / "federation", keeping)


@pytest.fixture(scope="module")
def _common_federation(keeping_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flower_grid, "Message", FakeMessage)
        yield InProcess.made(tmp_path_factory.mktemp("common") / "federation", keeping_config)


@pytest.fixture
def refusing(_common_federation: InProcess) -> Iterator[InProcess]:
    """One federation for all refusals of a module: its nodes and files are afterwards what they were."""
    grid, folder = _common_federation.grid, _common_federation.folder
    nodes, files = dict(grid.nodes), {path: path.read_bytes() for path in folder.glob("*/site.yaml")}
    yield _common_federation
    for path, content in files.items():
        path.write_bytes(content)
    grid.nodes, grid.keys, grid.rules = nodes, {}, []
    grid.pushed.clear()
    _common_federation.restart("paired", "image")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """One Ray for all tests of a module: the engines use one that is there, and starting it takes seconds."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    from polyfed.engines.ray import start_ray

    start_ray(num_cpus=4)
    yield
    ray.shutdown()
