"""The figures of a run, which its report shows and its folder has as PNG files in ``plots/``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polyfed.reporting.charts import FigureSheet, sheet_of
from polyfed.reporting.curves import client_charts, recorded_charts, server_charts
from polyfed.reporting.gantt import gantt_charts
from polyfed.reporting.incidents import events_chart
from polyfed.reporting.partition_charts import partition_sheet
from polyfed.reporting.traffic import bytes_bars, seconds_chart, sent_chart
from polyfed.reporting.weights import weight_sheets
from polyfed.runs.records import RunRecords

RUN_FIGURES = ("server", "recorded", "clients", "partition", "traffic", "bytes", "pace", "events")
"""Those that every run may have; others are of arrays that its method kept."""


def run_figures(records: RunRecords) -> dict[str, FigureSheet]:
    """Name of a figure -> what it shows; what was not recorded is left out.

    Raises:
        RunError: an array of the run is damaged.
    """
    traffic = [chart for chart in (sent_chart(records), seconds_chart(records)) if chart]
    sheets = {
        "server": sheet_of(f"{records.name}: server", server_charts(records)),
        "recorded": sheet_of(f"{records.name}: recorded by the method", recorded_charts(records)),
        "clients": sheet_of(f"{records.name}: clients, test", client_charts(records)),
        "partition": partition_sheet(records),
        "traffic": sheet_of(f"{records.name}: communication and time", traffic),
        "bytes": sheet_of(f"{records.name}: where the bytes went", bytes_bars(records), columns=3),
        "pace": sheet_of(f"{records.name}: clients in time", gantt_charts(records)),
        "events": sheet_of(f"{records.name}: events", events_chart(records)),
        **weight_sheets(records),
    }
    return {name: sheet for name, sheet in sheets.items() if sheet is not None}


def save_figures(figures: Mapping[str, FigureSheet], folder: Path) -> list[Path]:
    """Write each figure as a PNG file of its name; returns the files."""
    return [sheet.save(folder / f"{name}.png") for name, sheet in figures.items()]
