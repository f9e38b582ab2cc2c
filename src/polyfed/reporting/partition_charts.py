"""What each client holds: items by class, shares by column, and sizes."""

from __future__ import annotations

import numpy as np

from polyfed.reporting.charts import Chart, FigureSheet, LegendEntry
from polyfed.reporting.curves import group_colour
from polyfed.reporting.partition_tables import Held, classes_of, column_counts, groups_of, short_names, sources_of
from polyfed.reporting.row_charts import BarPart, BarRows, HeatMap
from polyfed.runs.records import RunRecords

_MOST_BARS = 60  # up to so many clients of a group have a bar each
_WRITTEN_CELLS = 80  # up to here counts fit into the map
_MAP_COLUMNS = 200


def partition_sheet(records: RunRecords) -> FigureSheet | None:
    """One row a group: maps of items by class (where labelled) and by column, and sizes as bars.

    Shares of each client's items by column stand where the class is made of columns. A group of many clients has the
    map by class alone.
    """
    rows = [
        charts
        for group, held in groups_of(records.holdings).items()
        if (charts := _charts_of(group, held, group_colour(records, group)))
    ]
    return FigureSheet(f"{records.name}: partition", rows) if rows else None


def _charts_of(group: str, held: Held, colour: int) -> list[Chart]:
    # a site that tells only its sizes has no classes to show
    charts: list[Chart] = [_classes(group, held)] if any(holding.labels for holding in held.values()) else []
    if len(held) <= _MOST_BARS:
        charts += [_shares(held)] if any(column_counts(held).values()) else []
        charts.append(_sizes(f"{group}: sizes ({', '.join(sources_of(held))})", held, colour))
    return charts


def _classes(group: str, held: Held) -> HeatMap:
    names = classes_of(held)
    shown = names[:_MAP_COLUMNS]
    counts = np.array([[(holding.labels or {}).get(name, 0) for name in shown] for holding in held.values()])
    note = f"The first {len(shown)} of {len(names)} classes." if len(shown) < len(names) else ""
    labels = [[f"{count:,}" for count in row] for row in counts.tolist()] if counts.size <= _WRITTEN_CELLS else []
    columns = short_names(shown, held)
    title = f"{group}: items by class"
    return HeatMap(title, list(held), counts.astype(float), "class", columns, note, scale="items", labels=labels)


def _shares(held: Held) -> HeatMap:
    """Per cent of each client's items on a scale from 0 to 100, with the counts where they fit."""
    counts = list(column_counts(held).values())
    names = list(counts[0])
    items = [max(1, holding.items) for holding in held.values()]
    shares = np.array([[100 * row[name] / total for name in names] for row, total in zip(counts, items, strict=True)])
    fit = len(names) * len(held) <= _WRITTEN_CELLS
    labels = [[f"{row[name]:,}" for name in names] for row in counts] if fit else []
    columns, limits = short_names(names, held), (0.0, 100.0)
    return HeatMap("by column (0 to 100 %)", list(held), shares, "column", columns, limits=limits, labels=labels)


def _sizes(title: str, held: Held, colour: int) -> BarRows:
    """Samples of each client, those that it holds in addition paler."""
    rows, amounts = {}, {}
    for client, holding in held.items():
        also = int(holding.also["samples"]) if holding.also else 0
        rows[client] = [BarPart(holding.samples - also, "samples", colour)]
        if also:
            rows[client].append(BarPart(also, "samples in addition", colour, 0.45))
        items = f"{holding.items:,} items, " if holding.items != holding.samples else ""
        amounts[client] = f"{items}{holding.samples:,}{' samples' if items else ''}"
    additional = any(holding.also for holding in held.values())
    legend = [LegendEntry("samples", colour, "area"), LegendEntry("samples in addition", colour, "band")]
    return BarRows(title, rows, amounts, "samples", legend if additional else ())
