"""A run on disk with what shows it; torch is imported only where a model is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polyfed.core.errors import ConfigError, nearest
from polyfed.reporting.charts import FigureSheet, sheet_of
from polyfed.reporting.curves import metric_charts
from polyfed.reporting.html.overview import page_head
from polyfed.reporting.html.page import write_html_report
from polyfed.reporting.markup import html_templates
from polyfed.reporting.plots import run_figures
from polyfed.runs.opened import Run, open_run

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
    allow_code: bool = False,
) -> ReportedRun:
    """Open a run, finished or not; this is ``polyfed.open_run``. Arguments and errors are those of
    ``polyfed.runs.opened.open_run``."""
    opened = open_run(folder, data_dir=data_dir, weights_dir=weights_dir, device=device, allow_code=allow_code)
    return ReportedRun(**vars(opened))
