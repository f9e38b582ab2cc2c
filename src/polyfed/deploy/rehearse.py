"""Rehearsal of a federation: server, gate and sites as real processes on this machine, until the run is complete."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from polyfed.core.errors import RunError
from polyfed.deploy.check import check_site
from polyfed.deploy.check_network import FLEET, ask
from polyfed.deploy.folders import ServerFolder, write_new
from polyfed.deploy.init import create_federation
from polyfed.deploy.processes import Processes, free_port
from polyfed.deploy.settings import ServerAddress, load_settings
from polyfed.runs.experiment import Experiment

_Report = Callable[[str], None]

_POLYFED = (sys.executable, "-m", "polyfed")
_START_SECONDS = 150.0
_GRACE = 30.0  # seconds: a site grants its own processes eight
_SHOWN_LINES = 15
_RUN = "run"


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
        write_new(known, experiment.to_yaml())
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
