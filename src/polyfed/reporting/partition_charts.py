"""What each client holds: bubbles of clients by classes, shares by column, sizes, and bars of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from polyfed.reporting.charts import BarPart, BarRows, BubbleChart, FigureSheet, HeatMap, HeatMapFrame, SheetChart
from polyfed.reporting.curves import group_colour
from polyfed.reporting.partition_tables import Held, classes_of, column_counts, groups_of, short_names, sources_of
from polyfed.reporting.tables import count
from polyfed.runs.records import Holding, RunRecords

MOST_BARS = 60
"""Up to so many clients of a group have a bar each on a page."""

_NAMED_CLASSES = 30  # up to here class names fit below the axis
_LONGEST_NAME = 30  # letters; classes with longer names are numbered, in the order of the table
_WRITTEN_CELLS = 80  # up to here counts fit into the map
_MAP_COLUMNS = 200
_QUANTILES = {"smallest": 0.0, "lower quarter": 0.25, "median": 0.5, "upper quarter": 0.75, "largest": 1.0}


def partition_sheet(records: RunRecords) -> FigureSheet | None:
    """One row a group: samples by client and class as bubbles (where labelled), and sizes as bars.

    Where the class is made of columns, shares of each client's items by column stand between them.
    """
    rows: list[list[SheetChart]] = []
    for group, held in groups_of(records.holdings).items():
        colour, sources = group_colour(records, group), ", ".join(sources_of(held))
        # a site that tells only its sizes has no classes to show
        if not any(holding.labels for holding in held.values()):
            rows.append([_sizes(f"{group}: sizes, no labels ({sources})", held, colour)])
            continue
        charts: list[SheetChart] = [_bubbles(f"{group}: samples by class ({sources})", held, colour)]
        if any(column_counts(held).values()):
            charts.append(_shares(held))
        rows.append([*charts, _sizes("sizes", held, colour)])
    return FigureSheet(f"{records.name}: partition", rows) if rows else None


def group_charts(group: str, held: Held, colour: int) -> list[BarRows | HeatMap]:
    """A bar for each client of a group; of many clients their sizes, and a map of classes where there are any."""
    classes = classes_of(held)
    if len(held) <= MOST_BARS:
        strengths = class_strengths(classes)
        rows = {client: _class_parts(holding, classes, strengths, colour) for client, holding in held.items()}
        title = f"Items of {group} clients{' by class' if classes else ''}"
        return [BarRows(title, rows, {client: _amount(holding) for client, holding in held.items()}, "client")]
    # hundreds of bars say less than five quantiles
    sizes = [holding.items for holding in held.values()]
    quantiles = {name: float(np.quantile(sizes, share)) for name, share in _QUANTILES.items()}
    parts = {name: [BarPart(size, count(size), colour)] for name, size in quantiles.items()}
    amounts = {name: count(size) for name, size in quantiles.items()}
    bars = BarRows("Items of a client", parts, amounts, "client")
    return [bars, _class_map(group, held, classes)] if classes else [bars]


def class_strengths(classes: Sequence[str]) -> dict[str, float]:
    """How strong the colour of each class is, from 1 for the first to 0.35 for the last."""
    return {name: 1.0 - 0.65 * place / max(1, len(classes) - 1) for place, name in enumerate(classes)}


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
    frames = {0: HeatMapFrame(list(held), shares)}
    return HeatMap(
        "by column (0 to 100 %)", frames, "column", short_names(names, held), limits=(0.0, 100.0), labels=labels
    )


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
    return BarRows(title, rows, amounts, "client", "samples")


def _class_parts(
    holding: Holding, classes: Sequence[str], strengths: Mapping[str, float], colour: int
) -> list[BarPart]:
    also = holding.also["items"] if holding.also else 0
    if holding.labels:
        counts = {name: holding.labels[name] for name in classes if name in holding.labels}
        parts = [BarPart(number, f"{name}: {number:,}", colour, strengths[name]) for name, number in counts.items()]
    else:
        parts = [BarPart(holding.items - also, f"{holding.items - also:,} items", colour)]
    if holding.also:
        parts.append(BarPart(also, f"in addition, of {holding.also['source']}: {also:,}", colour, 0.2))
    return parts


def _amount(holding: Holding) -> str:
    samples = f" ({holding.samples:,} samples)" if holding.samples != holding.items else ""
    return f"{holding.items:,}{samples}"


def _class_map(group: str, held: Held, classes: Sequence[str]) -> HeatMap:
    columns = classes[:_MAP_COLUMNS]
    values = np.array([[float((holding.labels or {}).get(name, 0)) for name in columns] for holding in held.values()])
    note = f"The first {len(columns)} of {len(classes)} classes." if len(columns) < len(classes) else ""
    title = f"Items of {len(held):,} {group} clients (rows) by class (columns)"
    return HeatMap(title, {0: HeatMapFrame(list(held), values)}, "class", columns, note)
