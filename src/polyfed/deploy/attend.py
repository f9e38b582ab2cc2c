"""A site of a federation: SuperNode and the site's worker, started again whenever they end."""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from polyfed.core.errors import RunError
from polyfed.deploy import flower
from polyfed.deploy.client_app import WORKER
from polyfed.deploy.connection import Connection, load_settings
from polyfed.deploy.files import SiteFolder, is_private, require_file
from polyfed.deploy.keys import public_half
from polyfed.deploy.processes import Processes, free_port, stopping
from polyfed.deploy.site_config import SiteConfig

_Report = Callable[[str], None]

_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0
_STEADY = 120.0
_USAGE = 2
"""Exit code of a program that does not understand its command line, which no waiting mends."""


def run_site(folder: Path, report: _Report, *, first_pause: float = _FIRST_PAUSE) -> int:
    """Connect a site until SIGTERM or SIGINT; returns the exit code.

    SuperNode ends when the server is started anew, does not know the site's key (yet), or still has an earlier session
    of it, for up to a minute; so it is started again, after pauses that grow from 5 to 60 seconds.

    Args:
        folder: the site's folder.
        report: is told, line by line, what happens.
        first_pause: seconds before the first new start.

    Raises:
        RunError, ConfigError: a file or program is missing or damaged.
    """
    site = SiteFolder(folder.resolve())
    connection = _require_complete(site)
    environment = flower.flower_environment(site.home)
    pauses = _pauses(first_pause)
    with stopping() as stop, _worker(site, environment, report) as worker:
        while not stop.is_set():
            command = flower.supernode_command(site, connection, connection.node_port or free_port())
            report(f"SuperNode: {flower.shown_command(command, environment)}")
            started = time.monotonic()
            with Processes() as processes:
                processes.start("SuperNode", command, environment, site.path)
                while not (ended := processes.ended()) and not stop.wait(0.2):
                    worker.keep_up()
            if stop.is_set():
                break
            lasted = time.monotonic() - started
            if ended["SuperNode"] == _USAGE:
                raise RunError(f"SuperNode does not understand its command line: {shlex.join(command)}")
            pauses = _pauses(first_pause) if lasted > _STEADY else pauses
            pause = next(pauses)
            report(f"SuperNode ended after {lasted:.0f} s (exit code {ended['SuperNode']}); again in {pause:g} s")
            stop.wait(pause)
    report("stopped")
    return 0


class _Worker:
    """The site's worker: messages wait for it while it is started again."""

    def __init__(self, processes: Processes, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self._processes, self._command, self._environment, self._folder = processes, command, environment, folder
        self._start()

    def keep_up(self) -> None:
        """Start it again if it has ended: killed, or out of memory in a client's step."""
        if self._processes.ended():
            self._start()

    def _start(self) -> None:
        self._processes.start("worker", self._command, self._environment, self._folder)


@contextlib.contextmanager
def _worker(site: SiteFolder, environment: dict[str, str], report: _Report) -> Iterator[_Worker]:
    """The worker for the length of the block; ``environment`` is told its socket."""
    with tempfile.TemporaryDirectory(prefix="polyfed-") as folder, Processes() as processes:
        environment[WORKER] = str(Path(folder) / "worker")  # a short path: sockets allow about 100 characters
        command = [sys.executable, "-P", "-m", "polyfed.deploy.worker", environment[WORKER]]
        report(f"worker: {shlex.join(command)}")
        yield _Worker(processes, command, environment, site.path)


def _pauses(first: float) -> Iterator[float]:
    pause = first
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


def _require_complete(site: SiteFolder) -> Connection:
    connection = load_settings(Connection, site.connection)
    SiteConfig.load(site.config)
    require_file(site.authority, "the server's operator gives it to every site")
    public_half(site.key)
    if not is_private(site.key):
        raise RunError(f"others can read the private key; run: chmod 600 {shlex.quote(str(site.key))}")
    return connection
