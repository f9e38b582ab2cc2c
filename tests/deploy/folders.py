"""Folders of a federation for tests, and one that is served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from federations import Started, experiment_settings, ports

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


def make(path: Path, *, keys: bool = True) -> Folders:
    port, superlink = ports()
    experiment = Experiment.load(experiment_settings())
    create_federation(path, experiment, ["localhost"], port=port, superlink_port=superlink, keys=keys)
    return Folders(path)


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Names and addresses that a certificate is valid for."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return tuple(str(name.value) for name in names)
