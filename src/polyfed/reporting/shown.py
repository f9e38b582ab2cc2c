"""``polyfed.plot`` and ``polyfed.report``: a run, finished or not, as figures and as a page."""

from __future__ import annotations

from pathlib import Path

from polyfed.core.errors import ConfigError, nearest
from polyfed.reporting.charts import FigureSheet, sheet_of
from polyfed.reporting.curves import metric_charts
from polyfed.reporting.page import write_html_report
from polyfed.reporting.plots import run_figures
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER, RunRecords


def plot(run: Run, *names: str) -> FigureSheet:
    """Figures of a run, with values on hovering in a notebook; ``save`` writes them as PNG.

    Args:
        run: as ``open_run`` gives it.
        names: metrics, such as ``r1_sum``, each of the server and of the groups of clients that have it; or one of
            the figures that the run folder has (``server``, ``clients``, ``partition``, ``traffic``, ...). Without
            names it is the first of these.

    Raises:
        ConfigError: the run recorded nothing of that name, or nothing at all.
    """
    records = run.records
    figures = run_figures(records)
    if len(names) <= 1 and (chosen := names[0] if names else next(iter(figures), "")) in figures:
        return figures[chosen]
    charts = []
    for name in names:
        own = metric_charts(records, name)
        if not own:
            known = [*_metric_names(records), *figures]
            raise ConfigError(f"run '{run.name}' has no metric '{name}'; {nearest(name, known)}")
        charts += own
    sheet = sheet_of(f"{run.name}: {', '.join(names)}", charts)
    if sheet is None:
        raise ConfigError(f"run '{run.name}' has recorded nothing to plot yet; continue it with polyfed resume")
    return sheet


def report(run: Run, out: Path | str | None = None) -> Path:
    """Write a run's report as one HTML file, by default ``report.html`` in its folder; returns the path."""
    return write_html_report(run.records, None if out is None else Path(out))


def _metric_names(records: RunRecords) -> list[str]:
    names = (name for participant in (SERVER, *records.clients) for name in records.metric_names(participant))
    return list(dict.fromkeys(names))
