"""A run's figures: what they show, and drawn with matplotlib as PNG files in ``plots/`` of its folder."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from polyfed.reporting.charts import (
    BarRows,
    BubbleChart,
    ChartLine,
    FigureSheet,
    HeatMap,
    LegendEntry,
    RoundChart,
    SheetChart,
    sheet_of,
)
from polyfed.reporting.curves import client_charts, server_charts
from polyfed.reporting.figures import COLOURS, GREY, SEQUENTIAL, empty_figure, legend_below, save, styled, whole_rounds
from polyfed.reporting.partition_charts import partition_sheet
from polyfed.reporting.traffic import running_chart, seconds_chart, sent_chart
from polyfed.reporting.weights import weight_charts
from polyfed.runs.records import RunRecords

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_BAND = 0.15  # strength of the colour of an area behind lines
_MARKED_VALUES = 5  # a single value would not be seen as a line
_NAMED_COLUMNS = 30  # up to so many columns of a map have their names below


def run_figures(records: RunRecords) -> dict[str, FigureSheet]:
    """Name of a plot -> what it shows; what was not recorded is left out.

    Raises:
        RunError: an array of the run is damaged.
    """
    traffic = [chart for chart in (sent_chart(records), running_chart(records), seconds_chart(records)) if chart]
    sheets = {
        "server": sheet_of(f"{records.name}: server", server_charts(records)),
        "clients": sheet_of(f"{records.name}: clients, test", client_charts(records)),
        "partition": partition_sheet(records),
        "traffic": sheet_of(f"{records.name}: communication and time", traffic),
    }
    sheets |= {name: sheet_of(f"{records.name}: {name}", charts) for name, charts in weight_charts(records).items()}
    return {name: sheet for name, sheet in sheets.items() if sheet is not None}


def draw_all(records: RunRecords) -> list[Path]:
    """Draw what a run recorded; returns the files, none for what it did not record."""
    folder = records.folder / "plots"
    return [save(draw_sheet(sheet), folder / f"{name}.png") for name, sheet in run_figures(records).items()]


def draw_partition(records: RunRecords) -> Figure | None:
    sheet = partition_sheet(records)
    return None if sheet is None else draw_sheet(sheet)


@styled
def draw_sheet(sheet: FigureSheet) -> Figure:
    """All charts of a sheet, in rows as high as their highest chart needs."""
    heights = [max(_inches(chart)[1] for chart in row) for row in sheet.rows]
    width = max(sum(_inches(chart)[0] for chart in row) for row in sheet.rows)
    figure = empty_figure(width, sum(heights) + 0.4, sheet.title)
    parts = figure.subfigures(len(sheet.rows), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, row in zip(parts, sheet.rows, strict=True):
        _draw_row(part, row, width)
    return figure


def _draw_row(part: SubFigure, row: Sequence[SheetChart], width: float) -> None:
    """Charts beside each other; those of a short row are as wide as those above."""
    widths = [_inches(chart)[0] for chart in row]
    unused = width - sum(widths)
    ratios = [*widths, unused] if unused > 0.5 else widths
    places = part.subplots(1, len(ratios), width_ratios=ratios, squeeze=False)[0]
    for axes, chart, inches in zip(places, row, widths, strict=False):
        axes.set_title(textwrap.fill(chart.title, round(11 * inches)))
        _draw(chart, axes)
        if chart is not row[0] and not isinstance(chart, RoundChart):
            axes.tick_params(labelleft=False)  # the rows are those of the chart beside it
    for axes in places[len(row) :]:
        axes.set_axis_off()


def _inches(chart: SheetChart) -> tuple[float, float]:
    """Width and height; long names of columns stand slanted below."""
    if isinstance(chart, RoundChart):
        return 5.0, 3.6
    if isinstance(chart, BarRows):
        return 4.0, 1.6 + 0.24 * len(chart.rows)
    if isinstance(chart, BubbleChart):
        names, rows = chart.named, chart.rows
    else:
        names, rows = list(_below(chart).values()), chart.last.rows
    slanted = 0.055 * max(0, max(map(len, names), default=0) - 8)
    return min(8.0, 2.5 + 0.5 * len(chart.columns)), 1.6 + 0.24 * len(rows) + slanted


def _below(chart: HeatMap) -> dict[int, str]:
    """Place -> name of the columns that are named below a map; of many columns only a few."""
    step = 1 if len(chart.columns) <= _NAMED_COLUMNS else len(chart.columns) // 8
    return {place: chart.columns[place] for place in range(0, len(chart.columns), step)}


def _colour(number: int) -> str:
    return COLOURS[(number - 1) % len(COLOURS)] if number else GREY


@singledispatch
def _draw(chart: SheetChart, axes: Axes) -> None:
    raise TypeError(f"{type(chart).__name__} is no chart")


@_draw.register(RoundChart)
def _draw_rounds(chart: RoundChart, axes: Axes) -> None:
    below = dict.fromkeys(chart.rounds, 0.0)
    for line in chart.lines:
        if chart.stacked:
            bottoms = [below[number] for number in line.finite]
            axes.bar(list(line.finite), list(line.finite.values()), 0.8, bottoms, color=_colour(line.colour))
            below |= {number: below[number] + value for number, value in line.finite.items()}
        else:
            _draw_line(line, axes)
    for band in chart.bands:
        low, high = list(band.low.values()), list(band.high.values())
        axes.fill_between(list(band.low), low, high, color=_colour(band.colour), alpha=_BAND, linewidth=0)
    axes.set(xlabel="round", ylabel=chart.unit)
    if len(chart.rounds) == 1:  # matplotlib would mark tenths of the round
        axes.set_xlim(chart.rounds[0] - 0.5, chart.rounds[0] + 0.5)
    if chart.value_range[0] == 0:
        axes.set_ylim(bottom=0)
    whole_rounds(axes)
    if chart.legend:
        legend_below(axes, columns=4, handles=[_handle(entry) for entry in chart.legend])


def _draw_line(line: ChartLine, axes: Axes) -> None:
    values = list(line.finite.values())
    if line.dash == "dotted" and len(values) == 1:
        axes.axhline(values[0], color=_colour(line.colour), linestyle=line.dash, linewidth=1.2)
        return
    (drawn,) = axes.plot(list(line.finite), values, color=_colour(line.colour), linestyle=line.dash)
    drawn.set(linewidth=0.8 if line.thin else 1.2 if line.dash == "dotted" else 1.8, alpha=0.6 if line.thin else 1)
    if len(values) <= _MARKED_VALUES and line.dash != "dotted":
        drawn.set_marker("o")


def _handle(entry: LegendEntry) -> Artist:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if entry.mark in ("solid", "dashed", "dotted"):
        line = Line2D([], [], color=_colour(entry.colour), label=entry.label)
        line.set(linestyle=entry.mark)
        return line
    return Patch(color=_colour(entry.colour), alpha=_BAND if entry.mark == "band" else 1.0, label=entry.label)


@_draw.register(HeatMap)
def _draw_map(chart: HeatMap, axes: Axes) -> None:
    rows, values = chart.last.rows, chart.last.values
    low, high = chart.scale
    axes.patch.set(hatch="///", edgecolor="#bbbbbb")  # shows through where there is no value
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=SEQUENTIAL, vmin=low, vmax=high)
    if len(chart.frames) > 1 or chart.limits is None:
        axes.figure.colorbar(image, ax=axes, label=f"round {max(chart.frames)}")
    for place, row in enumerate(chart.labels):
        for column, text in enumerate(row):
            colour = "black" if values[place, column] > low + 0.6 * (high - low) else "white"
            axes.text(column, place, text, ha="center", va="center", fontsize=7, color=colour)
    names = _below(chart)
    axes.set_xticks(list(names), list(names.values()), rotation=40, ha="right")
    _name_rows(axes, rows, room=0)
    axes.set_xlabel(". ".join(filter(None, [chart.column, chart.note])))
    axes.grid(visible=False)


@_draw.register(BubbleChart)
def _draw_bubbles(chart: BubbleChart, axes: Axes) -> None:
    rows, columns = np.nonzero(chart.counts)
    counts = chart.counts[rows, columns]
    # diameters in points: the largest bubble just fills its cell
    diameter = min(15.0, 500.0 / max(1, len(chart.columns)))
    areas = np.maximum(0.6, diameter**2 * counts / max(1, chart.counts.max()))
    axes.scatter(columns, rows, s=areas, color=_colour(chart.colour), alpha=0.85, linewidth=0)
    axes.set(xlim=(-0.7, len(chart.columns) - 0.3), xlabel=chart.column)
    if chart.named:
        slanted = max(map(len, chart.named)) * len(chart.named) > 90
        alignment = "right" if slanted else "center"
        axes.set_xticks(range(len(chart.columns)), chart.named, rotation=40 if slanted else 0, ha=alignment)
    _name_rows(axes, chart.rows)


@_draw.register(BarRows)
def _draw_bars(chart: BarRows, axes: Axes) -> None:
    for place, (name, parts) in enumerate(chart.rows.items()):
        left = 0.0
        for part in parts:
            axes.barh(place, part.value, left=left, color=_colour(part.colour), alpha=part.strength, height=0.7)
            left += part.value
        axes.annotate(chart.amounts[name], (left, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.margins(x=0.35)  # room for the amounts
    axes.set_xlim(left=0)
    axes.set_xlabel(chart.unit)
    labels = {part.label: part for parts in chart.rows.values() for part in parts}
    if 1 < len(labels) <= 3:
        from matplotlib.patches import Patch

        handles = [Patch(color=_colour(p.colour), alpha=p.strength, label=label) for label, p in labels.items()]
        legend_below(axes, columns=2, handles=handles)
    _name_rows(axes, list(chart.rows))
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def _name_rows(axes: Axes, names: Sequence[str], room: float = 0.1) -> None:
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(len(names) - 0.5 + room, -0.5 - room)
