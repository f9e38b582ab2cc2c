"""A site of a federation: SuperNode and the site's worker, started again whenever they end."""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from polyfed.core.errors import RunError
from polyfed.deploy import flower_programs
from polyfed.deploy.client_app import WORKER
from polyfed.deploy.files import SiteFolder, is_private, require_file
from polyfed.deploy.keys import public_half
from polyfed.deploy.processes import Processes, free_port, stopping
from polyfed.deploy.settings import Connection, SiteConfig, load_settings

_Report = Callable[[str], None]

_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0
_STEADY = 120.0  # seconds after which SuperNode counts as having been connected
_USAGE = 2  # exit code of a program that does not understand its command line, which no waiting mends


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
    connection = load_settings(Connection, site.connection)
    SiteConfig.load(site.config)
    require_file(site.authority, "the server's operator gives it to every site")
    public_half(site.key)
    if not is_private(site.key):
        raise RunError(f"others can read the private key; run: chmod 600 {shlex.quote(str(site.key))}")
    environment = flower_programs.flower_environment(site.home)
    pauses = _pauses(first_pause)
    with stopping() as stop, tempfile.TemporaryDirectory(prefix="polyfed-") as sockets, Processes() as workers:
        environment[WORKER] = str(Path(sockets) / "worker")  # a short path: sockets allow about 100 characters
        worker = [sys.executable, "-P", "-m", "polyfed.deploy.worker", environment[WORKER]]
        report(f"worker: {shlex.join(worker)}")
        workers.start("worker", worker, environment, site.path)
        while not stop.is_set():
            # two SuperNodes on one machine cannot share a port
            command = flower_programs.supernode_command(site, connection, free_port())
            report(f"SuperNode: {flower_programs.shown_command(command, environment)}")
            started = time.monotonic()
            with Processes() as processes:
                processes.start("SuperNode", command, environment, site.path)
                while not (ended := processes.ended()) and not stop.wait(0.2):
                    if workers.ended():  # killed, or out of memory in a client's step: messages wait meanwhile
                        workers.start("worker", worker, environment, site.path)
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


def _pauses(first: float) -> Iterator[float]:
    pause = first
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)
