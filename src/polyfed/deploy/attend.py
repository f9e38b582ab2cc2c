"""A site of a federation: its connection to the server and its worker, started again whenever they end."""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from polyfed.core.errors import RunError
from polyfed.deploy.engines.flower_pull import largest_message
from polyfed.deploy.files import SiteFolder, is_private, require_file
from polyfed.deploy.flower_programs import flower_environment
from polyfed.deploy.keys import public_half
from polyfed.deploy.processes import Processes, stopping
from polyfed.deploy.settings import Connection, SiteConfig, load_settings

_Report = Callable[[str], None]

_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0
_STEADY = 120.0  # seconds after which a connection counts as having been there


def run_site(folder: Path, report: _Report, *, first_pause: float = _FIRST_PAUSE) -> int:
    """Connect a site until SIGTERM or SIGINT; returns the exit code.

    The connection ends when the server is started anew, does not know the site's key (yet), or still has an earlier
    session of it, for up to a minute; so it is started again, after pauses that grow from 5 to 60 seconds.

    Args:
        folder: the site's folder.
        report: is told, line by line, what happens.
        first_pause: seconds before the first new start.

    Raises:
        RunError, ConfigError: a file or program is missing or damaged.
    """
    site = SiteFolder(folder.resolve())
    connection, config = load_settings(Connection, site.connection), SiteConfig.load(site.config)
    require_file(site.authority, "the server's operator gives it to every site")
    public_half(site.key)
    if not is_private(site.key):
        raise RunError(f"others can read the private key; run: chmod 600 {shlex.quote(str(site.key))}")
    environment, pauses = flower_environment(site.home), _pauses(first_pause)
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
                    if workers.ended():  # killed, or out of memory in a client's step: messages wait meanwhile
                        workers.start("worker", commands["worker"], environment, site.path)
            if stop.is_set():
                break
            lasted = time.monotonic() - started
            pauses = _pauses(first_pause) if lasted > _STEADY else pauses
            pause = next(pauses)
            report(f"connection ended after {lasted:.0f} s (exit code {ended['connection']}); again in {pause:g} s")
            stop.wait(pause)
    report("stopped")
    return 0


def site_commands(
    site: SiteFolder, connection: Connection, config: SiteConfig, socket: Path
) -> dict[str, Sequence[str]]:
    """The programs of a site by name; the connection reaches the worker at ``socket``."""
    largest = largest_message(config.limits, [None] * sum(group.count for group in config.clients.values()))
    python, place = [sys.executable, "-P", "-m"], [connection.server, str(site.path)]
    return {
        "worker": [*python, "polyfed.deploy.worker", str(socket)],
        "connection": [*python, "polyfed.deploy.connection", *place, str(socket), str(largest)],
    }


def _pauses(first: float) -> Iterator[float]:
    pause = first
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)
