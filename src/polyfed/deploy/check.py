"""The check of a site before it goes online: everything that can be known without taking part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from polyfed.core.errors import ConfigError
from polyfed.deploy import check_data, check_network, check_setup
from polyfed.deploy.connection import Connection, load_settings
from polyfed.deploy.files import SiteFolder
from polyfed.deploy.findings import Finding, guarded
from polyfed.deploy.leaving import what_leaves
from polyfed.deploy.site_config import SiteConfig


def check_site(folder: Path, *, network: bool = True) -> list[Finding]:
    """Look at a site's folder, machine, data and models, at its way to the server, and list what will leave it.

    Nothing is sent but requests without content; the site does not take part by it.

    Args:
        folder: the site's folder.
        network: whether to contact the server.
    """
    return list(site_findings(folder, network=network))


def site_findings(folder: Path, *, network: bool = True) -> Iterator[Finding]:
    """``check_site``, finding by finding as they are made."""
    site = SiteFolder(folder.resolve())
    yield from check_setup.check_versions()
    yield from guarded("node key", lambda: check_setup.check_key(site))
    yield from guarded("authority", lambda: check_setup.check_authority(site))
    connection = None
    try:
        connection = load_settings(Connection, site.connection)
    except ConfigError as error:
        yield Finding("error", "connection.yaml", str(error))
    if connection is not None and network:
        yield from guarded("server", lambda: check_network.check_server(site, connection))
    yield from guarded("site.yaml", lambda: _site(site, connection.seed if connection else 0))


def failed(findings: Iterable[Finding]) -> bool:
    """Whether any of them is an error."""
    return any(finding.level == "error" for finding in findings)


def _site(site: SiteFolder, seed: int) -> Iterator[Finding]:
    from polyfed.federation.population import Population

    config = SiteConfig.load(site.config)
    names = ", ".join(f"{name} ({group.count})" for name, group in config.clients.items())
    yield Finding("ok", "site.yaml", f"site '{config.name}' with clients {names}")
    yield from guarded("state folder", lambda: check_setup.check_state_folder(config))
    yield from guarded("private files", lambda: check_setup.check_privacy(config))
    yield from guarded("device", lambda: check_setup.check_device(config))
    population = Population(config.data, config.public, None, config.clients, seed)
    yield from guarded("public set", lambda: check_data.check_public(population, config))
    for member in population.members.values():
        yield from guarded(
            f"data of {member.id}",
            lambda member=member: check_data.check_holding(population, member),  # type: ignore[misc]
        )
        yield from guarded(
            f"model of {member.id}",
            lambda member=member: check_data.check_model(population, member, config),  # type: ignore[misc]
        )
    yield from guarded("what leaves", lambda: what_leaves(population, config))
