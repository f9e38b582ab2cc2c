"""``polyfed.run``, ``resume``, ``plot``, ``report`` and ``compare``: runs with their reports, figures and pages."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from polyfed.core.errors import ConfigError, PolyfedError, nearest
from polyfed.reporting.charts import FigureSheet, sheet_of
from polyfed.reporting.compare import RunComparison
from polyfed.reporting.page import Samples, write_html_report, write_report
from polyfed.reporting.run_figures import metric_charts, run_figures
from polyfed.runs.events import Callback, Event, RunComplete
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run, as_run, open_run
from polyfed.runs.records import SERVER
from polyfed.runs.session import begin_run, continue_run

log = logging.getLogger(__name__)


def run(experiment: Experiment, out: Path | str, callbacks: Iterable[Callback] = (), *, quiet: bool = False) -> Run:
    """Run an experiment in a new folder, with a report at the end and progress in a notebook.

    Args:
        experiment: The experiment.
        out: Run folder.
        callbacks: Callbacks that follow the run; the caller closes them.
        quiet: True for no reports at the end, and no progress in a notebook.

    Raises:
        PolyfedError: Settings are inconsistent; ``out`` stays empty unless the run had begun.
    """
    with _followed(callbacks, quiet) as following:
        return begin_run(experiment, Path(out), following)


def resume(
    folder: Path | str,
    callbacks: Iterable[Callback] = (),
    *,
    rounds: int | None = None,
    allow_code: bool = False,
    quiet: bool = False,
) -> Run:
    """Continue a run after its last complete round; the result is that of an uninterrupted run, bit for bit.

    Args:
        folder: Run folder.
        callbacks: Callbacks that follow the run; the caller closes them.
        rounds: Number of rounds that the run then has, complete ones included; None for the number it has now.
        allow_code: True to import components that the run names by import path, see ``polyfed.open_run``.
        quiet: See ``run``.

    Raises:
        ConfigError: The run names code, and ``allow_code`` is False; or it cannot have so many rounds: they are
            complete, or a schedule, noise, masks or sites depend on the number.
        RunError: It is not a run folder, its configuration was edited, or no checkpoint is readable.
    """
    with _followed(callbacks, quiet) as following:
        continue_run(open_run(folder, allow_code=allow_code), following, rounds)
        return open_run(folder, allow_code=allow_code)


@contextlib.contextmanager
def _followed(callbacks: Iterable[Callback], quiet: bool) -> Iterator[list[Callback]]:
    """Callbacks of a run: the caller's and, unless ``quiet``, its reports and in a notebook its progress."""
    if quiet:
        yield [*callbacks]
        return
    from polyfed.reporting.progress import progress_for
    from polyfed.reporting.terminal import Terminal

    terminal = Terminal()
    shown = progress_for(terminal) if terminal.is_jupyter else Callback()
    with contextlib.closing(shown):
        yield [Reports(), *callbacks, shown]


class Reports(Callback):
    """Writes both reports when a run is complete, and its figures unless ``run.output.plots`` is false."""

    def handle(self, event: Event) -> None:
        if isinstance(event, RunComplete):
            run = open_run(event.folder, allow_code=True)  # code that has just run here
            records = run.records
            plots = records.section("run").get("output", {}).get("plots", True)
            figures, samples = (run_figures(records), _samples(run)) if plots else ({}, ())
            for name, sheet in figures.items() if plots is True else ():
                sheet.save(records.folder / "plots" / f"{name}.png")
            write_report(records)
            write_html_report(records, figures=figures, samples=samples)


def _samples(run: Run) -> Samples:
    """Test samples for the page; empty for a deployment, whose page goes to all sites."""
    from polyfed.reporting.gallery import judged_samples

    try:
        return () if run.experiment.run.engine.is_deployed else judged_samples(run)
    except PolyfedError as error:  # the run is complete nevertheless
        log.warning("no test samples on the page: %s", error)
        return ()


def plot(run: Run, *names: str) -> FigureSheet:
    """Figures of a run, with values on hovering in a notebook; ``save`` writes them as PNG.

    Args:
        run: Result of ``open_run``.
        names: Metrics, such as ``r1_sum``, each of the server and of the groups of clients that have it; or one
            figure of the run folder (``server``, ``clients``, ``partition``, ``traffic``, ...), by default the first.

    Raises:
        ConfigError: The run has no records of that name, or none at all.
    """
    records = run.records
    figures = run_figures(records)
    if len(names) <= 1 and (chosen := names[0] if names else next(iter(figures), "")) in figures:
        return figures[chosen]
    charts = []
    for name in names:
        if not (own := metric_charts(records, name)):
            metrics = (metric for one in (SERVER, *records.clients) for metric in records.metric_names(one))
            valid = dict.fromkeys([*metrics, *figures])
            raise ConfigError(f"run '{run.name}' has no metric '{name}'; {nearest(name, valid)}")
        charts += own
    if (sheet := sheet_of(f"{run.name}: {', '.join(names)}", charts)) is None:
        raise ConfigError(f"run '{run.name}' has recorded nothing to plot yet; continue it with polyfed resume")
    return sheet


def report(run: Run, out: Path | str | None = None) -> Path:
    """Write a run's report as one HTML file, by default ``report.html`` in its folder; returns the path."""
    return write_html_report(run.records, None if out is None else Path(out))


def compare(
    runs: Sequence[Run | Path | str], *, metric: str | None = None, split: str = "test", against: str | None = None
) -> RunComparison:
    """Compare runs, seed by seed, as ``polyfed compare`` does.

    Args:
        runs: Runs or their folders; those that differ only by their seed are taken together.
        metric: Metric of the server and the clients; by default the main metric of each.
        split: ``test`` or ``validation``.
        against: Name or folder of the run that paired differences are against; by default the first.

    Raises:
        ConfigError: No participant of any run has the metric, the split is unknown, or no run has the name.
        RunError: A folder is not a run folder.
    """
    return RunComparison.of([as_run(run).records for run in runs], metric, split, against)
