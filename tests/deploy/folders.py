"""Folders of a federation for tests, and one that is served."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from federations import MARK, Started, experiment_settings, marked, ports, started, wait_until

from polyfed.deploy.files import ServerFolder, SiteFolder
from polyfed.deploy.flower_programs import Link, link_to
from polyfed.deploy.init import create_federation
from polyfed.deploy.settings import ServerAddress, load_settings
from polyfed.runs.experiment import Experiment


@dataclass(frozen=True)
class Folders:
    path: Path

    @property
    def server(self) -> ServerFolder:
        return ServerFolder(self.path / "server")

    @property
    def address(self) -> ServerAddress:
        return load_settings(ServerAddress, self.server.settings)

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


def make(path: Path, *, keys: bool = True, settings: dict[str, Any] | None = None) -> Folders:
    port, superlink = ports()
    experiment = Experiment.load(settings or experiment_settings())
    create_federation(path, experiment, ["localhost"], port=port, superlink_port=superlink, keys=keys)
    return Folders(path)


@contextlib.contextmanager
def served(folders: Folders, logs: Path) -> Iterator[Live]:
    """The federation while it is served, all its processes marked; in the end nothing of it is left."""
    mark = uuid.uuid4().hex
    environment = {MARK: mark}
    with started("server", str(folders.server.path), log=logs / "server.log", environment=environment) as process:
        process.wait_for("open for sites")
        yield Live(folders, process, environment, logs)
    wait_until(lambda: not marked(mark), 10, lambda: f"left: {marked(mark)}")


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Names and addresses that a certificate is valid for."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return tuple(str(name.value) for name in names)
