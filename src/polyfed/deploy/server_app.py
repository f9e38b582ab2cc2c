"""The ServerApp of a deployed run: the same session as in a simulation, over Flower's grid.

It runs in a process that SuperLink starts, on the machine of SuperLink. Whoever launched the run is told of its
progress and outcome through files in a folder of the launch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from polyfed.core.errors import PolyfedError
from polyfed.core.files import private_files, write_atomically
from polyfed.core.untrusted import log_plainly
from polyfed.deploy.engines.flower import within
from polyfed.reporting.api import resume, run
from polyfed.runs.events import PROGRESS, EventLog
from polyfed.runs.experiment import Experiment


class _Note:
    """What is left as a file in the folder of a launch."""

    file: ClassVar[str]

    def write(self, folder: Path) -> None:
        write_atomically(folder / self.file, json.dumps(vars(self)).encode())

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """What a launch's folder has of it, or None."""
        path = folder / cls.file
        return cls(**json.loads(path.read_bytes())) if path.is_file() else None


@dataclass(frozen=True)
class Launch(_Note):
    """What a launch asks for: a new run of the experiment in its folder ``out``, or to ``resume`` a run."""

    file: ClassVar[str] = "launch.json"
    out: str
    resume: bool
    allow_code: bool = False


@dataclass(frozen=True)
class ServedOutcome(_Note):
    """How a launch ended: it has none before.

    Attributes:
        error: what went wrong, or empty.
        mendable: whether the error is one that its message says how to mend.
        details: traceback.
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
    assert launch is not None  # whoever launched the run wrote it first
    out = Path(launch.out)
    try:
        with within(grid), contextlib.closing(EventLog(folder / PROGRESS)) as log:  # without rounds of launches before
            if launch.resume:
                resume(out, [log], allow_code=launch.allow_code)
            else:
                run(Experiment.load(folder / "experiment.yaml"), out, [log])
    except (KeyboardInterrupt, SystemExit):  # how Flower ends a ServerApp
        remedy = f"start the server again, if it has ended, and continue with 'polyfed resume {out}'"
        problem = f"the run was stopped at SuperLink; all complete rounds are safe: {remedy}"
        ServedOutcome(problem, mendable=True).write(folder)
        raise
    except BaseException as error:
        mendable = isinstance(error, PolyfedError)
        problem = str(error) if mendable else f"{type(error).__name__}: {error}"
        ServedOutcome(problem or type(error).__name__, mendable, traceback.format_exc()).write(folder)
        raise  # so that Flower's own record of the run says failed as well
    ServedOutcome().write(folder)
