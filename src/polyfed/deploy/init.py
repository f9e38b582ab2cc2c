"""Folders of a federation, made from one experiment: the server's, and one for every group of clients; rehearsal.

A rehearsal runs server, gate and sites as real processes on this machine, until the run is complete.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

from polyfed.core.errors import ConfigError, PolyfedError, RunError
from polyfed.core.files import whole, write_atomically
from polyfed.core.settings import parse_settings
from polyfed.deploy import folders
from polyfed.deploy.check import check_site, expected_data
from polyfed.deploy.check_network import FLEET, ask
from polyfed.deploy.flower_programs import Processes, free_port, link_to
from polyfed.deploy.folders import ServerFolder, SiteFolder
from polyfed.deploy.gate import caddyfile
from polyfed.deploy.settings import (
    PUBLIC_PORT,
    SUPERLINK_PORT,
    Connection,
    RosterEntry,
    ServerAddress,
    SiteConfig,
    SiteRoster,
    load_settings,
    to_yaml,
)
from polyfed.federation.membership import member_ids
from polyfed.federation.population import Population
from polyfed.runs.experiment import Experiment

_Report = Callable[[str], None]

_POLYFED = (sys.executable, "-m", "polyfed")
_START_SECONDS = 150.0
_GRACE = 30.0  # seconds: a site grants its own processes eight
_SHOWN_LINES = 15
_RUN = "run"

_log = logging.getLogger(__name__)

SERVER_FOLDER = "server"
"""Name of the server's folder, which no site can have."""

SITE_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"

_SITE_COMMENT = """\
Decisions of this site. All other settings are agreed by all sites, in agreed.yaml, which stays as it is.
Relative paths start from this folder. Before the site goes online: polyfed deploy check FOLDER"""
_NOTES = {
    "extends": "settings agreed by all sites",
    "name": "name under which the server admits this site's key",
    "data": "paths of the site's data, and of decoded images and features (cache_dir)",
    "state_dir": "folder of the client's state between rounds",
    "run": "device; threads, on which sums depend",
    "algorithms": "methods that may run here",
    "limits": "limits on messages from the server",
    "demands": "protection that a run must have; plan: exact refuses all but the run of plan.yaml",
    "roster": "sites whose keys are trusted in masked sums",
    "secret": "file from which noise is drawn",
    "tracebacks": "whether message and traceback of a failed step, which may show data, are sent to the server",
}
"""Comment on each decision of a site."""
_AGREED_COMMENT = """\
Settings agreed by all sites, for this one: data and their columns, the public set, its clients and their models.
A site does not edit this file; polyfed deploy check compares its data with it."""
_SERVER_COMMENT = "Address of the server. The Caddyfile next to it was made from this; change both."
_EXPERIMENT_COMMENT = "The federation's experiment, as the server runs it: polyfed run FILE"
_CONNECTION_COMMENT = "Address of this site's federation, from the server's operator."
_PLAN_COMMENT = """\
The planned run, for polyfed deploy check: content of the replies, their protection, and the demands that apply.
A run that differs, or has more rounds, is refused with demands.plan: exact in site.yaml."""


def create_federation(
    folder: Path,
    experiment: Experiment,
    hosts: Sequence[str],
    *,
    port: int = PUBLIC_PORT,
    superlink_port: int = SUPERLINK_PORT,
    keys: bool = False,
) -> dict[str, Path]:
    """Make the server's folder and one for each client group, with the group's name; returns them by name.

    Args:
        folder: New folder of the federation.
        experiment: Experiment of all sites; in a simulation it runs as it is.
        hosts: Names or addresses of the server for sites; the first is written into the sites' files.
        port: Public port.
        superlink_port: Port of SuperLink on the server's loopback.
        keys: True if all sites are on this machine: make their private keys too, admit them, and use the data in place.

    Raises:
        ConfigError: the client groups are missing or one is named ``server``, a setting is for simulations only, or a
            host is wrong.
        RunError: the folder exists or cannot be written to; it is removed then.
    """
    address = parse_settings(ServerAddress, {"hosts": list(hosts), "port": port, "superlink_port": superlink_port})
    _require_no_simulation(experiment)
    if not experiment.clients:
        raise ConfigError("the experiment has no clients; each group under 'clients' becomes a site")
    if SERVER_FOLDER in experiment.clients:
        raise ConfigError(f"clients.{SERVER_FOLDER}: a site cannot be called '{SERVER_FOLDER}'; rename the group")
    if folder.exists():
        raise RunError(f"'{folder}' exists already; name a new folder")
    try:
        authority = _create_server(ServerFolder(folder / SERVER_FOLDER), experiment, address)
        at_hand = Population(experiment.data, experiment.public, None, {}, experiment.run.seed)
        unread = ["the public set"] if experiment.public and public_digest(at_hand) is None else []
        for name in experiment.clients:
            agreed = _create_site(SiteFolder(folder / name), experiment, address, authority, at_hand, keys)
            unread += [] if agreed["expected"] else [name]
            if keys:
                folders.create_keys(folder / name, name)
                admit_site(folder / SERVER_FOLDER, name, folder / name / "node.pub")
        _create_rosters(folder, experiment, keys=keys)
        if unread:
            _log.warning("polyfed deploy check cannot compare data that are not here: %s", ", ".join(unread))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return {name: folder / name for name in (SERVER_FOLDER, *experiment.clients)}


def _require_no_simulation(experiment: Experiment) -> None:
    for name, group in experiment.clients.items():
        if group.missing is not None:
            raise ConfigError(f"clients.{name}.missing takes data away for simulations; leave it out of deployments")
    if experiment.run.attackers:
        raise ConfigError("run.attackers is for simulations; sites do not attack: leave it out of what is deployed")
    if experiment.run.pace.clients is not None:
        raise ConfigError("run.pace.clients: a deployment has a real clock; leave it out")


def admit_site(server: Path, name: str, public_key: Path) -> Path:
    """Put a site's public key among the admitted ones, where a running server finds it.

    Raises:
        ConfigError: the name is not valid for a site.
        RunError: the file is not an ECDSA public key, or the name has a key already.
    """
    if name == SERVER_FOLDER or not re.fullmatch(SITE_NAME, name):
        valid = "names have letters, digits, '.', '_', '-', a letter or digit first"
        raise ConfigError(f"site '{name}': {valid}, and are not '{SERVER_FOLDER}'")
    return folders.write_new(ServerFolder(server).sites / f"{name}.pub", f"{folders.read_public(public_key)} {name}\n")


def renew_certificate(server: Path, hosts: Sequence[str] = ()) -> tuple[str, ...]:
    """Replace the server's certificate and key by new ones of the same authority; returns the names in it.

    Args:
        server: The server's folder, which must have the authority's key for this.
        hosts: Names or addresses; empty: those in ``server.yaml``.

    Raises:
        RunError: the authority's key is missing or wrong.
    """
    files = ServerFolder(server)
    known = load_settings(ServerAddress, files.settings).hosts
    for path in files.authority:
        folders.require_file(path, "bring the authority's key back from where it is kept, for as long as this takes")
    names = tuple(hosts or known)
    made = folders.issue_server(folders.Identity(*(path.read_bytes() for path in files.authority)), names)
    certificate, key = files.identity
    key.unlink(missing_ok=True)
    folders.write_new(key, made.key, secret=True)
    write_atomically(certificate, made.certificate)
    return names


@lru_cache(maxsize=1)  # one federation is made, of several sites
def public_digest(population: Population) -> str | None:
    """Digest of the public set and its order; None without one, or if its data are at the sites only."""
    try:
        return population.public_order or None
    except PolyfedError:
        return None


def _create_server(server: ServerFolder, experiment: Experiment, address: ServerAddress) -> bytes:
    authority = folders.create_authority(experiment.name)
    identity = folders.issue_server(authority, address.hosts)
    for paths, made in ((server.authority, authority), (server.identity, identity)):
        folders.write_new(paths[0], made.certificate)
        folders.write_new(paths[1], made.key, secret=True)
    folders.write_new(server.settings, to_yaml(address, _SERVER_COMMENT))
    folders.write_new(server.gate, caddyfile(address.hosts[0], address.port, address.superlink_port))
    folders.write_new(server.experiment, to_yaml(server_experiment(experiment, address), _EXPERIMENT_COMMENT))
    for folder in (server.sites, server.logs):
        folder.mkdir()
    link_to(server, address)
    return authority.certificate


def server_experiment(experiment: Experiment, address: ServerAddress) -> dict[str, Any]:
    """The experiment without its clients, for a run over SuperLink."""
    content = experiment.model_dump(mode="json", exclude={"clients"})
    used = {experiment.public.source} if experiment.public else set()
    used |= {experiment.server.source} if experiment.server else set()
    content["data"]["sources"] = {name: one for name, one in content["data"]["sources"].items() if name in used}
    if content["privacy"] is not None:
        content["privacy"]["secret"] = None  # each site has its own
    content["run"]["engine"] = {
        "name": "flower",
        "superlink": f"127.0.0.1:{address.superlink_port}",
        "root_certificates": "ca.crt",
        "sites": list(experiment.clients),
        "clients": {name: group.count for name, group in experiment.clients.items() if group.count > 1},
    }
    return content


def site_files(
    name: str, experiment: Experiment, at_hand: Population, *, here: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Contents of a group's ``site.yaml`` and of the ``agreed.yaml`` that it extends.

    Args:
        name: Name of the group.
        experiment: Experiment of all sites.
        at_hand: Data of all sites, as far as they are on this machine.
        here: True if the site is on this machine as well, with these data.
    """
    content = experiment.model_dump(mode="json")
    group, data, privacy = experiment.clients[name], experiment.data, experiment.privacy
    used = {group.source, group.also and group.also.source, experiment.public and experiment.public.source}
    sources = {source: settings for source, settings in content["data"]["sources"].items() if source in used}
    paths = {source: settings.pop("path") for source, settings in sources.items() if settings.get("path")}
    own = {
        source: {"path": str(whole(path, data.data_folder)) if here else f"data/{source}{Path(path).suffix}"}
        for source, path in paths.items()
    }
    weights = data.weights_folder if here else data.weights_dir and "weights"
    decided = {
        "extends": "agreed.yaml",
        "name": name,
        "data": {"sources": own, "cache_dir": "cache"} | ({"weights_dir": str(weights)} if weights else {}),
        "state_dir": "state",
        "run": experiment.site().run.model_dump(),
        "algorithms": [experiment.algorithm.component_name()],
        "limits": content["run"]["exchange"]["limits"],
        "demands": _demands(experiment),
        "roster": "roster.yaml" if uses_rosters(experiment) else None,
        "secret": str(privacy.secret) if here and privacy and privacy.secret else None,
        "tracebacks": False,
    }
    agreed = {
        "data": {"max_pixels": data.max_pixels, "sources": sources},
        "public": content["public"],
        "clients": {name: content["clients"][name]},
        "public_digest": public_digest(at_hand),
        "expected": expected_data(at_hand, group),
    }
    return {key: value for key, value in decided.items() if value is not None}, agreed


def _demands(experiment: Experiment) -> dict[str, Any]:
    """Demands of a new site: the planned run, and at least the protection that it plans."""
    policy = experiment.policy
    settings, secure = policy.privacy, policy.secure
    content: dict[str, Any] = {"metrics": experiment.run.evaluate_clients is not False, "plan": "exact"}
    if secure is not None and secure.masks:
        content |= {"sums": "only", "smallest_range": secure.range}
    if settings is not None:
        delta = settings.budget.delta
        # epsilon of DP-SGD depends on the number of samples of a site, which is unknown here
        most = settings.budget.epsilon or policy.planned(delta) or None
        content |= {"max_epsilon": most, "delta": delta, "neighbours": settings.neighbours, "weights": "protected"}
    return content


def _create_site(
    site: SiteFolder, experiment: Experiment, address: ServerAddress, authority: bytes, at_hand: Population, here: bool
) -> dict[str, Any]:
    """Write the files of a site; returns the content of its ``agreed.yaml``."""
    host = address.hosts[0]
    shown = f"[{host}]" if ":" in host else host
    connection = Connection(server=f"{shown}:{address.port}", seed=experiment.run.seed)
    decided, agreed = site_files(site.path.name, experiment, at_hand, here=here)
    folders.write_new(site.config, to_yaml(decided, _SITE_COMMENT, _NOTES))
    folders.write_new(site.agreed, to_yaml(agreed, _AGREED_COMMENT))
    folders.write_new(site.connection, to_yaml(connection, _CONNECTION_COMMENT))
    folders.write_new(site.plan, to_yaml(experiment.spec("plan", agreed["public_digest"] or ""), _PLAN_COMMENT))
    folders.write_new(site.authority, authority)
    SiteConfig.load(site.config)  # refuses settings that are wrong for any site
    return agreed


def _create_rosters(folder: Path, experiment: Experiment, *, keys: bool) -> None:
    """Rosters for masked sums; each site adds the others' keys itself, without the server."""
    if not uses_rosters(experiment):
        return
    entries = {}
    for name, group in experiment.clients.items():
        key = folders.read_public(folder / name / "node.pub") if keys else None
        entries[name] = RosterEntry(key=key, clients=member_ids(name, group.count))
    for name in experiment.clients:
        SiteRoster(sites=entries).write(SiteFolder(folder / name).roster)


def uses_rosters(experiment: Experiment) -> bool:
    secure = experiment.aggregation.secure
    return secure is not None and secure.masks


def rehearse(experiment: Experiment, folder: Path, report: _Report) -> Path:
    """Train over real processes with TLS and keys; returns the run's folder below ``folder``, next to the logs.

    The sites' data are used in place. An interrupted rehearsal is continued after its last round.

    Args:
        experiment: Experiment of all sites.
        folder: New folder, or that of a rehearsal of the same experiment.
        report: Receives progress line by line, and the last lines of a process that ended.

    Raises:
        ConfigError: the experiment cannot be deployed.
        RunError: the folder has another experiment, a check failed, or a process ended.
    """
    server, run, known = ServerFolder(folder / "server"), folder / _RUN, folder / "rehearsed.yaml"
    if not folder.exists():
        ports = free_port(), free_port()
        create_federation(folder, experiment, ["localhost"], port=ports[0], superlink_port=ports[1], keys=True)
        folders.write_new(known, experiment.to_yaml())
    if not known.is_file() or known.read_text(encoding="utf-8") != experiment.to_yaml():
        raise RunError(f"'{folder}' is of another experiment or of none; give a new folder")
    if (run / "report.html").is_file():
        return run
    started = _Started(folder, report)
    try:
        started.command("server", "deploy", "server", str(server.path))
        report(f"server and gate start; logs are in {folder}")
        started.wait(lambda: _is_open(server), _START_SECONDS)
        for name in experiment.clients:
            if wrong := [str(finding) for finding in check_site(folder / name) if finding.level == "error"]:
                raise RunError(f"site {name}: polyfed deploy check found: {'; '.join(wrong)}")
            report(f"site {name}: checked, starts")
            started.command(name, "deploy", "site", str(folder / name))
        out = ["resume", str(run)] if run.exists() else ["run", str(server.experiment), "--out", str(run)]
        started.command(_RUN, *out)
        started.wait(lambda: started.processes.ended().get(_RUN) == 0)
    finally:
        started.processes.stop(_GRACE)
    return run


@dataclass(frozen=True)
class _Started:
    """Processes of a rehearsal, each with a log in its folder except the run, which is shown."""

    folder: Path
    report: _Report
    processes: Processes = field(default_factory=Processes)

    def command(self, name: str, *arguments: str) -> None:
        logged = () if name == _RUN else ("sh", "-c", 'exec "$@" >> "$0" 2>&1', f"{self.folder / name}.log")
        self.processes.start(name, [*logged, *_POLYFED, *arguments], os.environ, Path.cwd())

    def wait(self, is_done: Callable[[], bool], seconds: float = math.inf) -> None:
        """Wait for the condition.

        Raises:
            RunError: a process ended, or the time is over.
        """
        end = time.monotonic() + seconds
        while not is_done():
            if ended := self.processes.ended():
                for name in ended.keys() - {_RUN}:
                    lines = Path(f"{self.folder / name}.log").read_text(errors="replace").splitlines()
                    for line in lines[-_SHOWN_LINES:]:
                        self.report(f"{name}: {line}")
                codes = ", ".join(f"{name} (exit code {code})" for name, code in ended.items())
                raise RunError(f"the rehearsal ended with {codes}; the same command with FOLDER {self.folder} goes on")
            if time.monotonic() > end:
                raise RunError(f"the server is not open after {seconds:g} s; see {self.folder / 'server.log'}")
            time.sleep(0.1)


def unlike_runs(run: Path, other: Path) -> list[str]:
    """Files of metrics and weights (of models, else of the server's state) that differ in another run or lack there."""
    weights = [*run.rglob("models/**/*.safetensors")] or [*run.glob("checkpoints/*.safetensors")]
    pairs = {path: other / path.relative_to(run) for path in (run / "metrics.jsonl", *weights)}
    unlike = [path for path, own in pairs.items() if not own.is_file() or own.read_bytes() != path.read_bytes()]
    return sorted(str(path.relative_to(run)) for path in unlike)


def _is_open(server: ServerFolder) -> bool:
    address = load_settings(ServerAddress, server.settings)
    with suppress(RunError):  # until the gate listens
        return ask("localhost", address.port, FLEET, server.authority[0]).status < HTTPStatus.INTERNAL_SERVER_ERROR
    return False
