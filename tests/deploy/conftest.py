"""Federations in temporary folders."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from federations import MARK, Started, experiment_settings, marked, ports, started, wait_until

from polyfed.deploy.connection import ServerAddress, load
from polyfed.deploy.files import ServerFolder, SiteFolder
from polyfed.deploy.init import create_federation
from polyfed.deploy.link import Link
from polyfed.deploy.registry import link_to
from polyfed.experiment import Experiment


@dataclass(frozen=True)
class Folders:
    path: Path

    @property
    def server(self) -> ServerFolder:
        return ServerFolder(self.path / "server")

    @property
    def address(self) -> ServerAddress:
        return load(ServerAddress, self.server.settings)

    @property
    def link(self) -> Link:
        return link_to(self.server, self.address)

    def site(self, name: str) -> SiteFolder:
        return SiteFolder(self.path / name)


@dataclass(frozen=True)
class Live:
    folders: Folders
    process: Started
    environment: dict[str, str]
    logs: Path


def make(path: Path, *, keys: bool = True) -> Folders:
    port, superlink = ports()
    experiment = Experiment.load(experiment_settings())
    create_federation(path, experiment, ["localhost"], port=port, superlink_port=superlink, keys=keys)
    return Folders(path)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A federation of two sites with keys; not to be changed."""
    return make(tmp_path_factory.mktemp("made") / "federation")


@pytest.fixture
def fresh(tmp_path: Path) -> Folders:
    """A federation of one's own."""
    return make(tmp_path / "federation")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A federation that is served, all its processes marked; when it has been stopped nothing of it is left."""
    folder = tmp_path_factory.mktemp("live")
    folders = make(folder / "federation")
    mark = uuid.uuid4().hex
    environment = {MARK: mark}
    with started("server", str(folders.server.path), log=folder / "server.log", environment=environment) as process:
        process.wait_for("open for sites")
        yield Live(folders, process, environment, folder)
    wait_until(lambda: not marked(mark), 10, lambda: f"left: {marked(mark)}")
