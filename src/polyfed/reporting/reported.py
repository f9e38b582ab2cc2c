"""Running experiments, with plots and pages at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from polyfed.reporting.html.page import write_html_report
from polyfed.reporting.outcome import outcome
from polyfed.reporting.plots import draw_all
from polyfed.reporting.report import write_report
from polyfed.runs import runner
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run, open_run
from polyfed.runs.progress import Progress

if TYPE_CHECKING:
    from rich.console import RenderableType


def run(experiment: Experiment, out: Path | str, progress: Progress | None = None) -> Run:
    """Run an experiment into a new folder, which holds its report at the end.

    Raises:
        PolyfedError: something does not fit; nothing is left at ``out`` unless the run had begun.
    """
    return runner.run(experiment, out, progress, write_reports)


def resume(folder: Path | str, progress: Progress | None = None) -> Run:
    """Continue a run after its last complete round; the result is that of an uninterrupted run, bit for bit.

    Raises:
        RunError: not a run folder, its configuration was edited, or no checkpoint is readable.
    """
    return runner.resume(folder, progress, write_reports)


def write_reports(folder: Path, plots: bool) -> RenderableType:
    """Write the plots and both reports of a run.

    Returns:
        how the run came out, for a terminal.
    """
    records = open_run(folder).records
    if plots:
        draw_all(folder)
    write_report(records)
    write_html_report(records)
    return outcome(records)
