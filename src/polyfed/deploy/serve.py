"""Programs of a federation in the foreground: the server with its gate and admissions, and a site with its worker."""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Event

from polyfed.core.errors import PolyfedError, RunError
from polyfed.deploy import flower_programs as programs
from polyfed.deploy import folders
from polyfed.deploy.check_network import ask
from polyfed.deploy.engines.flower_pull import largest_message
from polyfed.deploy.flower_programs import Link, Processes, stopping
from polyfed.deploy.folders import ServerFolder, SiteFolder
from polyfed.deploy.gate import Signatures, answering, caddyfile, require_authentication
from polyfed.deploy.settings import Connection, ServerAddress, SiteConfig, load_settings

_Report = Callable[[str], None]

_START_TIMEOUT = 120.0
_INTERVAL = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0
_STEADY = 120.0  # seconds after which a connection counts as established


# ---- the server


def run_server(folder: Path, report: _Report) -> int:
    """Serve a federation until SIGTERM or SIGINT; returns the exit code: 0, or 1 if a program ended by itself.

    SuperLink forgets its nodes when it ends; the keys in ``sites/`` are registered anew at every start, before the
    gate opens. While it runs, a new key there is admitted and a removed one is expelled.

    Args:
        folder: The server's folder, as ``polyfed deploy init`` makes it.
        report: Receives progress line by line.

    Raises:
        RunError, ConfigError: a file or program is missing or damaged, or SuperLink does not start.
    """
    server = ServerFolder(folder.resolve())
    address = _require_complete(server)
    link, signatures = programs.link_to(server, address), Signatures()
    with stopping() as stop, answering(signatures.accepts) as asked, Processes() as processes:
        environment = programs.flower_environment(server.home) | {programs.AUTHENTICATION: asked}
        for name, command in server_commands(server, address).items():
            report(f"{name}: cd {shlex.quote(str(server.path))} && {programs.shown_command(command, environment)}")
            # the gate starts last, once SuperLink has the admitted keys
            processes.start(name, command, environment, server.path)
            if name == "SuperLink":
                _wait_for_superlink(server, address, processes, stop)
                admissions = Admissions(server.sites, link, report, signatures.admit)
                admissions.refresh()
        report(f"open for sites: {', '.join(f'{host}:{address.port}' for host in address.hosts)}")
        while not stop.wait(_INTERVAL):
            if ended := processes.ended():
                report("; ".join(f"{name} ended with exit code {code}" for name, code in ended.items()))
                return 1
            admissions.refresh()
        report("stopping")
    return 0


def server_commands(server: ServerFolder, address: ServerAddress) -> dict[str, Sequence[str]]:
    """Commands of a server's programs by name, in the order of their start.

    Raises:
        RunError: a program is missing.
    """
    return {
        "SuperLink": programs.superlink_command(server, address),
        "SuperExec": programs.superexec_command(server, address),
        "gate": [programs.program("caddy"), "run", "--config", str(server.gate), "--adapter", "caddyfile"],
    }


class Admissions:
    """Keeps SuperLink's list of nodes, and that of the gate, equal to the public keys in a folder.

    Attributes:
        admitted: Flower's id of the node, and the name of the site, of each public key.
    """

    def __init__(
        self, sites: Path, link: Link, report: _Report, open_gate: Callable[[Iterable[str]], None] = lambda keys: None
    ) -> None:
        self.sites, self.link, self.report, self._open_gate = sites, link, report, open_gate
        self.admitted: dict[str, tuple[int, str]] = {}
        self._expelled: set[str] = set()
        self._complaints: set[str] = set()

    def refresh(self) -> None:
        """Register new keys and unregister removed ones; a problem is reported once, and retried."""
        wanted = self._wanted()
        self._open_gate(wanted.keys() & self.admitted.keys())
        for key in self.admitted.keys() - wanted.keys():
            node, name = self.admitted[key]
            if self._done(self.link.unregister, node):
                del self.admitted[key]
                self._expelled.add(key)  # SuperLink registers no key twice
                self.report(f"expelled: {name}")
        for key in wanted.keys() - self.admitted.keys():
            if self._done(self._admit, wanted[key], key):
                self.report(f"admitted: {wanted[key].stem} ({folders.fingerprint(key)})")
        self._open_gate(wanted.keys() & self.admitted.keys())

    def _admit(self, path: Path, key: str) -> None:
        if key in self._expelled:  # SuperLink does not forget a key while it runs
            raise RunError(f"{path.name} was expelled; give the site a new key, or restart the server to take it back")
        self.admitted[key] = (self.link.register(path), path.stem)

    def _wanted(self) -> dict[str, Path]:
        paths: dict[str, Path] = {}
        for path in sorted(self.sites.glob("*.pub")):
            self._done(lambda path: paths.setdefault(folders.read_public(path), path), path)
        return paths

    def _done(self, action: Callable[..., object], *arguments: object) -> bool:
        try:
            action(*arguments)
        except PolyfedError as error:
            if str(error) not in self._complaints:
                self.report(f"warning: {error}")
                self._complaints.add(str(error))
            return False
        return True


def _require_complete(server: ServerFolder) -> ServerAddress:
    address = load_settings(ServerAddress, server.settings)
    for path in (server.authority[0], *server.identity):
        folders.require_file(path, "make the folder with: polyfed deploy init")
    if not server.gate.exists():
        folders.write_new(server.gate, caddyfile(address.hosts[0], address.port, address.superlink_port))
    require_authentication(server.gate)
    server.logs.mkdir(exist_ok=True)
    return address


def _wait_for_superlink(server: ServerFolder, address: ServerAddress, processes: Processes, stop: Event) -> None:
    limit, here = time.monotonic() + _START_TIMEOUT, ("127.0.0.1", address.superlink_port)
    while not stop.is_set():
        with contextlib.suppress(RunError):
            if ask(*here, "/health", server.authority[0]).status == 200:
                return
        if ended := processes.ended():
            raise RunError(f"SuperLink ended with exit code {ended['SuperLink']} at its start; see its output above")
        if time.monotonic() > limit:
            raise RunError(f"SuperLink does not answer on 127.0.0.1:{here[1]} after {_START_TIMEOUT:g} s")
        stop.wait(0.2)


# ---- a site


def run_site(folder: Path, report: _Report, *, first_pause: float = _FIRST_PAUSE) -> int:
    """Connect a site until SIGTERM or SIGINT; returns the exit code.

    The connection ends when the server restarts, has not admitted the site's key yet, or still has an earlier session
    of it, for up to a minute; so it is started again, after pauses that grow from 5 to 60 seconds.

    Args:
        folder: The site's folder.
        report: Receives progress line by line.
        first_pause: Seconds before the first new start.

    Raises:
        RunError, ConfigError: a file or program is missing or damaged.
    """
    site = SiteFolder(folder.resolve())
    connection, config = load_settings(Connection, site.connection), SiteConfig.load(site.config)
    folders.require_file(site.authority, "the server's operator sends it to every site")
    folders.public_half(site.key)
    if not folders.is_private(site.key):
        raise RunError(f"others can read the private key; run: chmod 600 {shlex.quote(str(site.key))}")
    environment, pause = programs.flower_environment(site.home), first_pause
    with stopping() as stop, tempfile.TemporaryDirectory(prefix="polyfed-") as sockets, Processes() as workers:
        socket = Path(sockets) / "worker"  # a short path: sockets allow about 100 characters
        commands = site_commands(site, connection, config, socket)
        for name, command in commands.items():
            report(f"{name}: {shlex.join(command)}")
        workers.start("worker", commands["worker"], environment, site.path)
        while not stop.is_set():
            started = time.monotonic()
            with Processes() as processes:
                processes.start("connection", commands["connection"], environment, site.path)
                while not (ended := processes.ended()) and not stop.wait(0.2):
                    if workers.ended():  # killed, or out of memory in a client's step; messages wait meanwhile
                        workers.start("worker", commands["worker"], environment, site.path)
            if stop.is_set():
                break
            lasted = time.monotonic() - started
            pause = first_pause if lasted > _STEADY else pause
            report(f"connection ended after {lasted:.0f} s (exit code {ended['connection']}); again in {pause:g} s")
            stop.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    report("stopped")
    return 0


def site_commands(site: SiteFolder, connection: Connection, config: SiteConfig, socket: Path) -> dict[str, list[str]]:
    """Commands of a site's programs by name; the connection reaches the worker at ``socket``."""
    largest = largest_message(config.limits, [None] * sum(group.count for group in config.clients.values()))
    python, arguments = [sys.executable, "-P", "-m"], [connection.server, str(site.path), str(socket), str(largest)]
    return {
        "worker": [*python, "polyfed.deploy.worker", str(socket)],
        "connection": [*python, "polyfed.deploy.connection", *arguments],
    }
