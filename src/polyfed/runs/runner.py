"""Running experiments, and going on with runs."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from polyfed.core.device import cpu_threads
from polyfed.runs.event_log import PROGRESS, EventLog
from polyfed.runs.events import Callback
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.opened import Run, open_run
from polyfed.runs.session import Session


def run_experiment(experiment: Experiment, out: Path | str, callbacks: Iterable[Callback] = ()) -> Run:
    """Run an experiment into a new folder; ``polyfed.run`` does, and reports the run as well.

    Raises:
        PolyfedError: something does not fit; nothing is left at ``out`` unless the run had begun.
    """
    # threads are part of the configuration: a sum over a tensor has other last bits with another number of them
    with cpu_threads(experiment.run.threads), RunFolder.create(Path(out)) as folder, _logged(folder) as log:
        Session(experiment, folder, secrets.token_hex(8), [*callbacks, log]).start()
    return Run(Path(out))


def resume_run(folder: Path | str, callbacks: Iterable[Callback] = (), *, allow_code: bool = False) -> Run:
    """Continue a run after its last complete round; ``polyfed.resume`` does, and reports the run as well.

    Raises:
        RunError: not a run folder, its configuration was edited, or no checkpoint is readable.
    """
    opened = open_run(folder, allow_code=allow_code)
    experiment, files = opened.experiment, opened.files
    with cpu_threads(experiment.run.threads), _logged(files) as log:
        Session(experiment, files, files.identity, [*callbacks, log]).resume()
    return opened


@contextlib.contextmanager
def _logged(folder: RunFolder) -> Iterator[EventLog]:
    with folder.lock(), contextlib.closing(EventLog(folder.path / PROGRESS)) as log:
        yield log
