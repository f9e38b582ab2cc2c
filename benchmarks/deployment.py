"""Programs of a benchmark, and a federation of processes on loopback; both end when a block is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from polyfed.core.errors import RunError
from polyfed.deploy.flower_programs import Processes, free_port
from polyfed.deploy.init import create_federation
from polyfed.runs.experiment import Experiment

POLYFED = [sys.executable, "-m", "polyfed"]
_GRACE = 12.0  # seconds; polyfed gives its own programs 8
_INTO_LOG = 'exec "$@" >"$0" 2>&1'  # for sh -c: the log is $0


class Programs:
    """Programs by name, each with a log of its own; stopped with all their offspring on leaving the block.

    Args:
        folder: Folder of the logs, and of Ray's temporary files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes = Processes()

    def __enter__(self) -> Programs:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, *problem: object) -> None:
        self._processes.stop(_GRACE)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a program in the folder."""
        here = str(Path(__file__).resolve().parent)
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "POLYFED_CACHE": str(self.folder / "cache")}
        own |= {"TMPDIR": str(self.folder), "RAY_TMPDIR": str(self.folder)}  # a killed program leaves nothing
        own |= {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        into_log = ["sh", "-c", _INTO_LOG, str(self.log(name)), *command]
        self._processes.start(name, into_log, {**os.environ, **own, **(environment or {})}, self.folder)

    def log(self, name: str) -> Path:
        """Log of a program."""
        return self.folder / f"{name}.log"

    def logged(self, name: str) -> str:
        """Content of a program's log so far."""
        return self.log(name).read_text(errors="replace") if self.log(name).is_file() else ""

    def code(self, name: str) -> int | None:
        """Exit code of a program; None while it runs."""
        return self._processes.running[name].poll()

    def run(self, name: str, command: Sequence[str], seconds: float = 3600) -> None:
        """Start a program and wait for its end.

        Raises:
            RunError: It failed; the message has the end of its log.
        """
        self.start(name, command)
        self.wait(name, lambda: self.code(name) is not None, seconds)
        if code := self.code(name):
            raise RunError(f"{name} ended with exit code {code}\n{self._tail(name)}")

    def wait_for(self, name: str, text: str, seconds: float = 180) -> None:
        """Wait until a program's log has a text.

        Raises:
            RunError: It ended, or did not log the text in time.
        """

        def logged() -> bool:
            if text in self.logged(name):
                return True
            if self.code(name) is not None:
                raise RunError(f"{name} ended before it logged '{text}'\n{self._tail(name)}")
            return False

        self.wait(name, logged, seconds)

    def wait(self, name: str, met: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition that a program brings about.

        Raises:
            RunError: Not met in time.
        """
        limit = time.monotonic() + seconds
        while not met():
            if time.monotonic() > limit:
                raise RunError(f"{name} takes more than {seconds:g} s\n{self._tail(name)}")
            time.sleep(0.05)

    def tree(self, name: str) -> list[psutil.Process]:
        """A program and all its offspring."""
        head = psutil.Process(self._processes.running[name].pid)
        return [head, *head.children(recursive=True)]

    def _tail(self, name: str) -> str:
        return "\n".join(self.logged(name).splitlines()[-30:]) or "(no log)"


@dataclass(frozen=True)
class Loopback:
    """A federation whose server and sites run on this machine.

    Attributes:
        programs: Its processes: ``server``, and each site by its name.
        folder: Folder of ``polyfed deploy init``.
        sites: Names of the sites.
        seconds: Time from the first process to the last site that is connected.
    """

    programs: Programs
    folder: Path
    sites: tuple[str, ...]
    seconds: float

    @property
    def experiment(self) -> Path:
        """File that ``polyfed run`` runs over the sites."""
        return self.folder / "server" / "experiment.yaml"


def bring_up(programs: Programs, content: Mapping[str, Any]) -> Loopback:
    """Make the folders of an experiment's federation and start ``polyfed deploy server`` and ``site`` for each group.

    Args:
        programs: Programs that the federation's processes are added to, and end with.
        content: The experiment.
    """
    folder = programs.folder / "federation"
    experiment = Experiment.load(content)
    create_federation(folder, experiment, ["localhost"], port=free_port(), superlink_port=free_port(), keys=True)
    sites = tuple(experiment.clients)
    began = time.monotonic()
    start_server(programs, folder)
    for site in sites:
        loosen(folder, site)
        start_site(programs, folder, site)
    for site in sites:
        programs.wait_for(site, "connected to")
    return Loopback(programs, folder, sites, time.monotonic() - began)


def start_server(programs: Programs, folder: Path) -> None:
    """Start the server of a federation and wait until it is open."""
    programs.start("server", [*POLYFED, "deploy", "server", str(folder / "server")])
    programs.wait_for("server", "open for sites")


def loosen(folder: Path, site: str, **settings: Any) -> None:
    """Let a site take part in other runs than the planned one."""
    path = folder / site / "site.yaml"
    content = yaml.safe_load(path.read_text()) | {"demands": {"plan": "any"}} | settings
    path.write_text(yaml.safe_dump(content))


def start_site(programs: Programs, folder: Path, site: str) -> None:
    """Start a site of a federation."""
    programs.start(site, [*POLYFED, "deploy", "site", str(folder / site)])
