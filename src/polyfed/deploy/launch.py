"""Deployed runs: the launch, and the server half in a ServerApp of SuperLink, followed through files of the launch.

SuperLink gets an app of two lines, which imports the polyfed that is installed there; sites fetch no app at all. The
server half is the same session as in a simulation, over Flower's grid.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from polyfed.core.errors import ConfigError, PolyfedError, RunError
from polyfed.core.files import private_files, write_atomically
from polyfed.core.untrusted import log_plainly
from polyfed.core.version import __version__
from polyfed.deploy.engines.flower import Flower, within
from polyfed.deploy.flower_programs import Link
from polyfed.reporting.api import resume, run
from polyfed.runs.config_files import START
from polyfed.runs.events import PROGRESS, Callback, Callbacks, EventLog, follow
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.opened import Run, open_run

_PREFIX = "polyfed-launch-"
_STATUS_EVERY = 10.0  # seconds between requests to SuperLink for the status of the run

_APP = {
    "pyproject.toml": f"""[project]
name = "polyfed-app"
version = "{__version__}"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "polyfed"

[tool.flwr.app.components]
serverapp = "polyfed_server:server"
clientapp = "polyfed_server:server"  # required by Flower; no site fetches it

[tool.flwr.app.config]
launch = ""
""",
    "polyfed_server.py": "from polyfed.deploy.launch import server_app\n\nserver = server_app()\n",
}


class _Note:
    """Content of a file in the folder of a launch."""

    file: ClassVar[str]

    def write(self, folder: Path) -> None:
        write_atomically(folder / self.file, json.dumps(vars(self)).encode())

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The note in a launch's folder, or None."""
        path = folder / cls.file
        return cls(**json.loads(path.read_bytes())) if path.is_file() else None


@dataclass(frozen=True)
class Launch(_Note):
    """Request of a launch: a new run of the experiment in its folder ``out``, or to ``resume`` a run."""

    file: ClassVar[str] = "launch.json"
    out: str
    resume: bool
    allow_code: bool = False


@dataclass(frozen=True)
class ServedOutcome(_Note):
    """Outcome of a launch that has ended.

    Attributes:
        error: Error of the run, or empty.
        mendable: True if the error's message contains the remedy.
        details: Traceback.
    """

    file: ClassVar[str] = "outcome.json"
    error: str = ""
    mendable: bool = False
    details: str = ""


def server_app() -> Any:
    """The ServerApp that SuperLink runs; the run configuration's ``launch`` is the launch's folder."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        _serve(grid, Path(str(context.run_config["launch"])))

    return app


@private_files()
def _serve(grid: Any, folder: Path) -> None:
    log_plainly(logging.WARNING, "%(levelname)s: %(message)s")
    launch = Launch.read(folder)
    assert launch is not None  # written before the run started
    out = Path(launch.out)
    try:
        with within(grid), contextlib.closing(EventLog(folder / PROGRESS)) as log:  # without rounds of earlier launches
            if launch.resume:
                resume(out, [log], allow_code=launch.allow_code)
            else:
                run(Experiment.load(folder / "experiment.yaml"), out, [log])
    except (KeyboardInterrupt, SystemExit):  # Flower ends a ServerApp in this way
        remedy = f"start the server again, if it has ended, and continue with 'polyfed resume {out}'"
        problem = f"the run was stopped at SuperLink; all complete rounds are safe: {remedy}"
        ServedOutcome(problem, mendable=True).write(folder)
        raise
    except BaseException as error:
        mendable = isinstance(error, PolyfedError)
        problem = str(error) if mendable else f"{type(error).__name__}: {error}"
        ServedOutcome(problem or type(error).__name__, mendable, traceback.format_exc()).write(folder)
        raise  # so that Flower's own record of the run is failed as well
    ServedOutcome().write(folder)


def launch(experiment: Experiment, out: Path, callbacks: Iterable[Callback] = ()) -> Run:
    """Run a deployed experiment and write its run folder; call it on the machine of the SuperLink.

    Args:
        experiment: Experiment with ``run.engine`` flower and a SuperLink.
        out: Run folder.
        callbacks: Followers of the run.

    Raises:
        PolyfedError: as ``polyfed.run``, and if SuperLink cannot be reached or ends.
    """
    experiment.run.engine.require()
    data = experiment.data
    # resolved here, as the ServerApp has another environment
    folders = {"dir": data.data_folder, "weights_dir": data.weights_folder, "cache_dir": data.cache_folder}
    rooted = experiment.model_copy(update={"data": data.model_copy(update=folders)})
    RunFolder.require_free(out)
    with _Launch(_flower(rooted), callbacks) as started:
        (started.folder / "experiment.yaml").write_text(rooted.to_yaml(), encoding="utf-8")
        (started.folder / START).write_text(str(experiment.start), encoding="utf-8")
        return started.carry_out(Launch(str(out.resolve()), resume=False))


def relaunch(folder: Path, callbacks: Iterable[Callback] = (), *, allow_code: bool = False) -> Run:
    """Continue a deployed run after its last complete round; ``allow_code`` as for ``polyfed.resume``.

    Raises:
        PolyfedError: as ``polyfed.resume``, and if SuperLink cannot be reached or ends.
    """
    opened = open_run(folder, allow_code=allow_code)
    with _Launch(_flower(opened.experiment), callbacks) as started:
        return started.carry_out(Launch(str(opened.folder.resolve()), resume=True, allow_code=allow_code))


class _Launch:
    """Folder of one launch, and its run at SuperLink, which is stopped if the block is left early."""

    def __init__(self, engine: Flower, callbacks: Iterable[Callback]) -> None:
        assert engine.superlink is not None
        _clear_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._link = Link(self.folder / "flower", engine.superlink, engine.root_certificates)
        self._callbacks, self._held = Callbacks(callbacks), ExitStack()
        self._run, self._asked, self._gone = "", 0.0, ""

    def __enter__(self) -> _Launch:
        self._held.enter_context(RunFolder(self.folder).lock())
        return self

    def __exit__(self, *problem: object) -> None:
        if self._run and ServedOutcome.read(self.folder) is None:
            with suppress(PolyfedError):
                self._link.call("stop", self._run)
        self._held.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def carry_out(self, launch: Launch) -> Run:
        """Start the run and follow it to its end.

        Raises:
            PolyfedError: the run failed; the message contains the remedy.
            ServerHalfError: the run failed in an unforeseen way.
            RunError: SuperLink ended.
        """
        launch.write(self.folder)
        app = self.folder / "polyfed-app"
        app.mkdir()
        for name, text in _APP.items():
            (app / name).write_text(text)
        answer = self._link.call("run", str(app), "--run-config", f"launch={json.dumps(str(self.folder))}")
        self._run = str(answer["run-id"])
        out = Path(launch.out)
        follow(self.folder / PROGRESS, self._callbacks, out, finished=self._is_over)
        if (outcome := ServedOutcome.read(self.folder)) is None:
            remedy = f"start the server again and continue with 'polyfed resume {launch.out}'"
            raise RunError(f"{self._gone}; all complete rounds are safe: {remedy}")
        if outcome.error and outcome.mendable:
            raise RunError(outcome.error)
        if outcome.error:
            raise ServerHalfError(f"{outcome.error}\n{outcome.details}")
        return open_run(out)

    def _is_over(self) -> bool:
        if ServedOutcome.read(self.folder) is not None or self._gone:
            return True
        if time.monotonic() - self._asked > _STATUS_EVERY:
            self._asked = time.monotonic()  # each request starts a process of Flower's
            self._gone = self._lost()
        return False

    def _lost(self) -> str:
        """Reason if no outcome can be expected any more, else empty."""
        try:
            (run,) = self._link.call("list", "--run-id", self._run)["runs"]
        except (PolyfedError, KeyError, ValueError):
            return f"SuperLink at {self._link.address} does not answer any more"
        status = str(run.get("status", ""))
        if not status.startswith("finished") or ServedOutcome.read(self.folder) is not None:
            return ""
        return f"the run has ended at SuperLink without an outcome (status {status})"


def _clear_abandoned() -> None:
    """Remove folders of launches that were killed, unless their run goes on at SuperLink."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError, TypeError):
            is_ours = folder.lstat().st_uid == os.getuid() and (folder / ".lock").is_file()
            if is_ours and not RunFolder(folder).is_worked_on():
                launch = Launch.read(folder)
                if launch is None or not RunFolder(Path(launch.out)).is_worked_on():
                    shutil.rmtree(folder)


class ServerHalfError(Exception):
    """Unforeseen failure of the server half of a deployed run; the message has its traceback."""


def _flower(experiment: Experiment) -> Flower:
    engine = experiment.run.engine
    if not isinstance(engine, Flower) or not engine.is_deployed:
        raise ConfigError("run.engine is not a deployment; it needs {name: flower, superlink: ..., sites: [...]}")
    if engine.root_certificates and not engine.root_certificates.is_file():
        raise ConfigError(f"run.engine.root_certificates: the file '{engine.root_certificates}' is missing")
    return engine
