"""Programs of a benchmark, and a federation of processes on loopback; all of it is gone when a block is left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

from polyfed.core.errors import RunError
from polyfed.deploy.init import create_federation
from polyfed.deploy.processes import Processes, free_port
from polyfed.runs.experiment import Experiment

POLYFED = [sys.executable, "-m", "polyfed"]
MARK = "POLYFED_BENCHMARK"
_GRACE = 12.0  # seconds; polyfed gives its own programs 8
_ENDING = (signal.SIGINT, signal.SIGTERM)
_INTO_LOG = 'exec "$@" >"$0" 2>&1'  # for sh -c: the log is $0


class Programs:
    """Programs by name, each with a log of its own; stopped with all their offspring on leaving the block.

    Args:
        folder: where logs go, and temporary files of Ray.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._processes = Processes()

    def __enter__(self) -> Programs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _undisturbed():
            self._processes.stop(_GRACE)
            for process in self._marked():  # what outlived its parents
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a program in the folder."""
        here = str(Path(__file__).resolve().parent)
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: self.mark}
        own |= {"TMPDIR": str(self.folder), "RAY_TMPDIR": str(self.folder)}  # whoever is killed leaves nothing
        own |= {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        into_log = ["sh", "-c", _INTO_LOG, str(self.log(name)), *command]
        self._processes.start(name, into_log, {**os.environ, **own, **(environment or {})}, self.folder)

    def log(self, name: str) -> Path:
        """What a program said."""
        return self.folder / f"{name}.log"

    def run(self, name: str, command: Sequence[str], seconds: float = 3600) -> None:
        """Start a program and wait for its end.

        Raises:
            RunError: it failed; the end of its log is told.
        """
        self.start(name, command)
        self.wait(name, lambda: name in self._processes.ended(), seconds)
        if code := self._processes.running.pop(name).returncode:
            raise RunError(f"{name} ended with exit code {code}\n{self._tail(name)}")

    def wait_for(self, name: str, text: str, seconds: float = 180) -> None:
        """Wait until a program says something.

        Raises:
            RunError: it ended, or did not say it in time.
        """

        def said() -> bool:
            if name in self._processes.ended():
                raise RunError(f"{name} ended before it said '{text}'\n{self._tail(name)}")
            return self.log(name).is_file() and text in self.log(name).read_text(errors="replace")

        self.wait(name, said, seconds)

    def wait(self, name: str, met: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition that a program brings about.

        Raises:
            RunError: not in time.
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
        path = self.log(name)
        return "\n".join(path.read_text(errors="replace").splitlines()[-30:]) if path.is_file() else "(no log)"

    def _marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found


@dataclass(frozen=True)
class Loopback:
    """A federation whose server and sites run on this machine.

    Attributes:
        programs: its processes: ``server``, and each site by its name.
        folder: what ``polyfed deploy init`` made.
        sites: names.
        seconds: from the first process to the last site that is connected.
    """

    programs: Programs
    folder: Path
    sites: tuple[str, ...]
    seconds: float

    @property
    def experiment(self) -> Path:
        """What ``polyfed run`` runs over the sites."""
        return self.folder / "server" / "experiment.yaml"


def bring_up(
    programs: Programs, content: Mapping[str, Any], prepare: Callable[[Path], None] = lambda site: None
) -> Loopback:
    """Make the folders of an experiment's federation and start ``polyfed deploy server`` and ``site`` for each group.

    Args:
        programs: the processes are added to these, and end with them.
        content: the experiment.
        prepare: called with each site's folder before the site starts.
    """
    folder = programs.folder / "federation"
    experiment = Experiment.load(content)
    create_federation(folder, experiment, ["localhost"], port=free_port(), superlink_port=free_port(), keys=True)
    sites = tuple(experiment.clients)
    began = time.monotonic()
    programs.start("server", [*POLYFED, "deploy", "server", str(folder / "server")])
    programs.wait_for("server", "open for sites")
    for site in sites:
        prepare(folder / site)
        programs.start(site, [*POLYFED, "deploy", "site", str(folder / site)])
    for site in sites:
        programs.wait_for(site, "connected to")
    return Loopback(programs, folder, sites, time.monotonic() - began)


@contextlib.contextmanager
def ending_properly() -> Iterator[None]:
    """Within the block SIGTERM is what Ctrl-C is, so that processes are stopped; once is enough."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in _ENDING:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _handled(interrupt):
        yield


def _undisturbed() -> contextlib.AbstractContextManager[None]:
    """Neither may keep processes from being stopped."""
    return _handled(signal.SIG_IGN)


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _ENDING}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
