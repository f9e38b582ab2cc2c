"""What each client holds: bubbles of clients by classes, shares by column, and sizes."""

from __future__ import annotations

import numpy as np

from polyfed.reporting.charts import Chart, FigureSheet, LegendEntry
from polyfed.reporting.curves import group_colour
from polyfed.reporting.partition_tables import Held, classes_of, column_counts, groups_of, short_names, sources_of
from polyfed.reporting.row_charts import BarPart, BarRows, BubbleChart, HeatMap
from polyfed.reporting.tables import count
from polyfed.runs.records import RunRecords

_MOST_BARS = 60  # up to so many clients of a group have a row each
_NAMED_CLASSES = 30  # up to here class names fit below the axis
_LONGEST_NAME = 30  # letters; classes with longer names are numbered, in the order of the table
_WRITTEN_CELLS = 80  # up to here counts fit into the map
_MAP_COLUMNS = 200
_QUANTILES = {"smallest": 0.0, "lower quarter": 0.25, "median": 0.5, "upper quarter": 0.75, "largest": 1.0}


def partition_sheet(records: RunRecords) -> FigureSheet | None:
    """One row a group: samples by client and class as bubbles (where labelled), and sizes as bars.

    Where the class is made of columns, shares of each client's items by column stand between them. A group of many
    clients has a map of items by class and quantiles of the sizes instead.
    """
    rows = [
        _charts_of(group, held, group_colour(records, group)) for group, held in groups_of(records.holdings).items()
    ]
    return FigureSheet(f"{records.name}: partition", rows) if rows else None


def _charts_of(group: str, held: Held, colour: int) -> list[Chart]:
    sources = ", ".join(sources_of(held))
    # a site that tells only its sizes has no classes to show
    labelled = any(holding.labels for holding in held.values())
    if len(held) > _MOST_BARS:
        title = f"{group}: items of each of {len(held):,} clients ({sources})"
        return [*([_class_map(group, held)] if labelled else []), _quantiles(title, held, colour)]
    if not labelled:
        return [_sizes(f"{group}: sizes, no labels ({sources})", held, colour)]
    charts: list[Chart] = [_bubbles(f"{group}: samples by class ({sources})", held, colour)]
    if any(column_counts(held).values()):
        charts.append(_shares(held))
    return [*charts, _sizes("sizes", held, colour)]


def _bubbles(title: str, held: Held, colour: int) -> BubbleChart:
    names = classes_of(held)
    counts = np.array([[(holding.labels or {}).get(name, 0) for name in names] for holding in held.values()])
    below = short_names(names, held)
    if len(below) > _NAMED_CLASSES or max(map(len, below), default=0) > _LONGEST_NAME:
        below = []
    axis = f"class (largest bubble: {counts.max():,} samples, area is proportional)"
    return BubbleChart(title, list(held), axis, names, counts, colour, below)


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


def _quantiles(title: str, held: Held, colour: int) -> BarRows:
    # hundreds of bars say less than five quantiles
    sizes = [holding.items for holding in held.values()]
    quantiles = {name: float(np.quantile(sizes, share)) for name, share in _QUANTILES.items()}
    amounts = {name: count(size) for name, size in quantiles.items()}
    rows = {name: [BarPart(size, amounts[name], colour)] for name, size in quantiles.items()}
    return BarRows(title, rows, amounts, "items")


def _class_map(group: str, held: Held) -> HeatMap:
    classes = classes_of(held)
    columns = classes[:_MAP_COLUMNS]
    values = np.array([[float((holding.labels or {}).get(name, 0)) for name in columns] for holding in held.values()])
    note = f"The first {len(columns)} of {len(classes)} classes." if len(columns) < len(classes) else ""
    title = f"{group}: items of {len(held):,} clients (rows) by class (columns)"
    return HeatMap(title, list(held), values, "class", columns, note, scale="items")
