"""Running experiments, and going on with runs."""

from __future__ import annotations

import secrets
from pathlib import Path

from polyfed.core.device import cpu_threads
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.opened import Run, open_run
from polyfed.runs.progress import Progress, Reporter, SilentProgress, unreported
from polyfed.runs.session import Session


def run(
    experiment: Experiment, out: Path | str, progress: Progress | None = None, reporter: Reporter = unreported
) -> Run:
    """Run an experiment into a new folder; ``polyfed.run`` does, and reports the run as well.

    Raises:
        PolyfedError: something does not fit; nothing is left at ``out`` unless the run had begun.
    """
    with cpu_threads(experiment.run.threads), RunFolder.create(Path(out)) as folder, folder.lock():
        Session(experiment, folder, progress or SilentProgress(), secrets.token_hex(8), reporter).start()
    return Run(Path(out))


def resume(folder: Path | str, progress: Progress | None = None, reporter: Reporter = unreported) -> Run:
    """Continue a run after its last complete round; the result is that of an uninterrupted run, bit for bit.

    Raises:
        RunError: not a run folder, its configuration was edited, or no checkpoint is readable.
    """
    opened = open_run(folder)
    experiment, files = opened.experiment, opened.files
    with cpu_threads(experiment.run.threads), files.lock():
        Session(experiment, files, progress or SilentProgress(), files.identity, reporter).resume()
    return Run(opened.folder)
