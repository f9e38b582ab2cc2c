"""Running experiments, with plots and pages at the end; and runs with what shows them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polyfed.core.errors import ConfigError, nearest
from polyfed.reporting.charts import FigureSheet, sheet_of
from polyfed.reporting.curves import metric_charts
from polyfed.reporting.html.overview import page_head
from polyfed.reporting.html.page import write_html_report
from polyfed.reporting.markup import html_templates
from polyfed.reporting.plots import draw_all, run_figures
from polyfed.reporting.report import write_report
from polyfed.runs.events import Callback, Event, RunComplete
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run, open_run
from polyfed.runs.runner import resume_run, run_experiment
from polyfed.runs.tuning import tuned_twin

if TYPE_CHECKING:
    import pandas as pd


class ReportedRun(Run):
    """A run on disk, with figures, tables and its report; a notebook shows it as a short table."""

    def plot(self, *names: str) -> FigureSheet:
        """Figures with values on hovering in a notebook; ``save`` writes them as PNG.

        Args:
            names: metrics, such as ``r1_sum``, each of the server and of the groups of clients that have it; or one
                of the figures that the run folder has (``server``, ``clients``, ``partition``, ``traffic``, ...).
                Without names it is the first of these.

        Raises:
            ConfigError: the run recorded nothing of that name, or nothing at all.
        """
        figures = run_figures(self.records)
        if len(names) <= 1 and (chosen := names[0] if names else next(iter(figures), "")) in figures:
            return figures[chosen]
        charts = []
        for name in names:
            found = metric_charts(self.records, name)
            if not found:
                raise ConfigError(
                    f"run '{self.name}' has no metric '{name}'; {nearest(name, [*self._metrics(), *figures])}"
                )
            charts += found
        sheet = sheet_of(f"{self.name}: {', '.join(names)}", charts)
        if sheet is None:
            raise ConfigError(f"run '{self.name}' has recorded nothing to plot yet; continue it with polyfed resume")
        return sheet

    def to_pandas(self, table: Literal["metrics", "events", "traffic", "rounds"] = "metrics") -> pd.DataFrame:
        """Records as a pandas frame, a row a record; columns as for ``RunRecords.frame``."""
        return self.records.frame(table)

    def report(self, out: Path | str | None = None) -> Path:
        """Write the report as one HTML file, by default ``report.html`` in the run folder; returns its path."""
        return write_html_report(self.records, None if out is None else Path(out))

    def _metrics(self) -> Iterable[str]:
        everybody = ["server", *self.records.clients]
        return dict.fromkeys(name for participant in everybody for name in self.records.metric_names(participant))

    def _repr_html_(self) -> str:
        head = page_head(self.records)
        return html_templates().get_template("run.html.j2").render(head=head)


def open_reported(
    folder: Path | str,
    *,
    data_dir: Path | None = None,
    weights_dir: Path | None = None,
    device: str | None = None,
) -> ReportedRun:
    """Open a run, finished or not; this is ``polyfed.open_run``. Arguments and errors are those of
    ``polyfed.runs.opened.open_run``."""
    opened = open_run(folder, data_dir=data_dir, weights_dir=weights_dir, device=device)
    return ReportedRun(opened.folder, opened.data_dir, opened.weights_dir, opened.device)


def run(experiment: Experiment, out: Path | str, callbacks: Iterable[Callback] = ()) -> ReportedRun:
    """Run an experiment into a new folder, which holds its report at the end; a notebook shows how it goes.

    A twin whose server trains alone is tuned before, which takes many runs (``polyfed.runs.tuning``).

    Args:
        experiment: what is run.
        out: run folder.
        callbacks: follow the run; the caller closes them.

    Raises:
        PolyfedError: something does not fit; nothing is left at ``out`` unless the run had begun.
    """
    with _followed(callbacks) as following:
        if experiment.twin is not None and experiment.twin.is_to_be_tuned:
            experiment, record = tuned_twin(experiment, Path(out), following)
            following.append(record)
        return open_reported(run_experiment(experiment, out, following).folder)


def resume(folder: Path | str, callbacks: Iterable[Callback] = ()) -> ReportedRun:
    """Continue a run after its last complete round; the result is that of an uninterrupted run, bit for bit.

    Raises:
        RunError: not a run folder, its configuration was edited, or no checkpoint is readable.
    """
    with _followed(callbacks) as following:
        return open_reported(resume_run(folder, following).folder)


@contextlib.contextmanager
def _followed(callbacks: Iterable[Callback]) -> Iterator[list[Callback]]:
    """What follows a run: its reports, the caller's callbacks, and in a notebook its progress."""
    from polyfed.reporting.progress import progress_for
    from polyfed.reporting.terminal import Terminal

    terminal = Terminal()
    shown = progress_for(terminal) if terminal.is_jupyter else Callback()
    with contextlib.closing(shown):
        yield [Reports(), *callbacks, shown]


class Reports(Callback):
    """Writes both reports when a run is complete, and its plots unless ``run.plots`` is false."""

    def handle(self, event: Event) -> None:
        """Write them."""
        if isinstance(event, RunComplete):
            records = open_run(event.folder).records
            if records.config.get("run", {}).get("plots", True):
                draw_all(records)
            write_report(records)
            write_html_report(records)
