"""Studies whose cells are not run, but have figures that are made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from polyfed.core.randomness import derive_seed
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.runner import Ended, Progress
from polyfed.lab.studies.session import StudyRun
from polyfed.lab.studies.study import Study


def made_up(study: Study, out: Path, listener: Callable[[Progress], None]) -> StudyRun:
    """In place of ``run_study``: a figure a row and seed, the same whenever it is asked for."""
    (column,) = study.columns
    values = {
        (row, (), column): {seed: derive_seed(row, seed) % 10_000 / 100 for seed in study.seeds} for row in study.rows
    }
    listener(Progress(len(values), 0, 0, {}, None))
    results = Results(study, values)
    out.mkdir(parents=True, exist_ok=True)
    results.save(out)
    return StudyRun(results, Ended({}, ()), out)
