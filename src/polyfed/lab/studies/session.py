"""``run_study``: a study from Python, and the folder that it leaves."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyfed.core.errors import ConfigError, RunError, nearest
from polyfed.lab.studies.cells import Places
from polyfed.lab.studies.planning import StudyPlan
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.runner import Ended, OnProgress, Runner, default_jobs, gpus_here
from polyfed.lab.studies.study import Study

CELLS = "cells"
"""Folder of all cells, beside the folders of the studies that share them."""


@dataclass(frozen=True)
class StudyRun:
    """A study after an invocation.

    Attributes:
        results: all that is known.
        ended: what is missing, and why.
        folder: where it is kept.
    """

    results: Results
    ended: Ended
    folder: Path


def run_study(
    study: Study,
    out: Path,
    *,
    places: Places | None = None,
    only: Sequence[str] | None = None,
    jobs: int | None = None,
    budget: float | None = None,
    listener: OnProgress = lambda progress: None,
) -> StudyRun:
    """Run the cells that are missing, and write what is known of the study.

    Args:
        study: what is run.
        out: its folder; its cells are in the folder ``cells`` beside it, shared with the other studies there.
        places: of data and weights, and the engine.
        only: rows that are run; None: all.
        jobs: cells at once; None: one a GPU, else one a core.
        budget: seconds; None: no limit.
        listener: is told of progress.

    Raises:
        ConfigError: a setting of a row is wrong (found before any cell begins), or there is no such row.
        DataError: the data of a row are not there (likewise).
        RunError: another process works on the study.
    """
    for row in only or ():
        if row not in study.rows:
            raise ConfigError(f"--only {row}: no such row; {nearest(row, study.rows)}")
    plan = StudyPlan(study, places or Places(), out.parent / CELLS)

    def save(failures: Mapping[str, str]) -> None:
        Results.gather(plan, failures).save(out)  # whoever looks while it runs sees what is there

    gpus = gpus_here()
    runner = Runner(plan, jobs or gpus or default_jobs(), gpus, budget, only, listener, save)
    runner.prepare()
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        ended = runner.run()
    return StudyRun(Results.load(out), ended, out)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two invocations would run the same cells."""
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another process works on the study in '{folder}'; wait for it, or choose another --out"
            ) from None
        yield
