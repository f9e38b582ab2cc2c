"""Charts of a run, and sheets of several: a sheet is a file in ``plots/``, a figure of a page, or of a notebook."""

from __future__ import annotations

import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyfed.core.files import write_atomically
from polyfed.reporting import figures
from polyfed.reporting.markup import printable
from polyfed.reporting.statistics import finite_values
from polyfed.reporting.tables import TextTable, format_number

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAND = 0.15
"""Strength of the colour of an area behind lines."""

_LONGEST_NAME = 40  # letters


@dataclass(frozen=True)
class Chart(ABC):
    """A part of a figure with its own axes.

    Attributes:
        title: Subject of the chart.
    """

    title: str

    @property
    def inches(self) -> tuple[float, float]:
        """Width and height; a phone shows a chart of this width unreduced."""
        return 3.8, 3.0

    @abstractmethod
    def draw(self, axes: Axes) -> None:
        """Draw all but the title."""

    def values_table(self) -> TextTable | None:
        """Values as numbers; None where the chart shows them itself."""
        return None


class LegendEntry(NamedTuple):
    """An entry of a legend; ``mark`` is ``solid``, ``dashed``, ``dotted``, ``area`` or ``band``."""

    label: str
    colour: int = 0
    mark: str = "solid"

    def handle(self) -> Artist:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        label = short_name(self.label)
        if self.mark in ("area", "band"):
            return Patch(color=chart_colour(self.colour), alpha=BAND if self.mark == "band" else 1.0, label=label)
        line = Line2D([], [], color=chart_colour(self.colour), label=label)
        line.set(linestyle=self.mark)
        return line


@dataclass(frozen=True)
class FigureSheet:
    """A figure of charts in rows; each row is as high as its highest chart."""

    title: str
    rows: Sequence[Sequence[Chart]]

    @figures.styled
    def draw(self) -> Figure:
        heights = [max(chart.inches[1] for chart in row) for row in self.rows]
        width = max(sum(chart.inches[0] for chart in row) for row in self.rows)
        drawing = figures.empty_figure(width, sum(heights) + 0.4 * bool(self.title), self.title)
        parts = drawing.subfigures(len(self.rows), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, row in zip(parts, self.rows, strict=True):
            widths = [chart.inches[0] for chart in row]
            unused = width - sum(widths)  # the charts of a short row are as wide as those above
            ratios = [*widths, unused] if unused > 0.5 else widths
            beside = part.subplots(1, len(ratios), width_ratios=ratios, squeeze=False)[0]
            for axes, chart in zip(beside, row, strict=False):
                axes.set_title(wrapped(chart.title, chart.inches[0]))
                chart.draw(axes)
            for axes in beside[len(row) :]:
                axes.set_axis_off()
        return drawing

    @cached_property
    def svgs(self) -> list[str]:
        """SVG of each chart, for a page or a notebook that places as many in a row as it has room for; values appear on
        hovering."""
        charts = [chart for row in self.rows for chart in row]
        labels = [printable(f"{self.title}: {chart.title}") for chart in charts]
        drawn = [FigureSheet("", [[chart]]).draw() for chart in charts]
        return list(map(figures.svg_text, drawn, labels))

    @property
    def tables(self) -> list[TextTable]:
        """Values of the charts."""
        return [table for row in self.rows for chart in row if (table := chart.values_table()) is not None]

    # notebooks prefer HTML; PNG serves those without it, and export to paper
    def _repr_html_(self) -> str:
        return "".join(self.svgs)

    def _repr_png_(self) -> bytes:
        return figures.png_bytes(self.draw())

    def save(self, path: Path | str) -> Path:
        """Write a PNG file, complete or not at all; returns the path."""
        write_atomically(Path(path), self._repr_png_())
        return Path(path)


def sheet_of(title: str, charts: Sequence[Chart], columns: int = 3) -> FigureSheet | None:
    """Charts in rows of ``columns``; None without charts."""
    rows = [charts[start : start + columns] for start in range(0, len(charts), columns)]
    return FigureSheet(title, rows) if rows else None


def chart_colour(number: int) -> str:
    return figures.COLOURS[(number - 1) % len(figures.COLOURS)] if number else figures.GREY


def value_text(value: float) -> str:
    return format_number(value) if abs(value) >= 1 or value == 0 or math.isnan(value) else f"{value:.3g}"


def short_name(name: str) -> str:
    name = printable(name)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def wrapped(text: str, inches: float) -> str:
    """Text in at most three lines, as wide as the axes."""
    return textwrap.fill(printable(text), round(11 * inches), max_lines=3, placeholder=" …")


# ---- charts by round: lines with bands, or stacked bars


_MARKED_VALUES = 25  # markers of more rounds would hide the lines
_MOST_TABLE_ROUNDS = 200

RoundSeries: TypeAlias = Mapping[int, float]


@dataclass(frozen=True)
class ChartLine:
    """Values by round; those that are not finite are left out.

    Attributes:
        label: Name in tables and on hovering.
        values: Round -> value.
        colour: Number of the colour from 1, or 0 for grey.
        dash: ``solid``, ``dashed`` or ``dotted``.
        thin: True for one of many lines.
    """

    label: str
    values: RoundSeries
    colour: int = 1
    dash: str = "solid"
    thin: bool = False

    @cached_property
    def finite(self) -> dict[int, float]:
        return finite_values(self.values)

    def draw(self, axes: Axes) -> None:
        if self.dash == "dotted" and len(self.finite) == 1:
            axes.axhline(*self.finite.values(), color=chart_colour(self.colour), linestyle=self.dash, linewidth=1.2)
            return
        (line,) = axes.plot(list(self.finite), list(self.finite.values()), color=chart_colour(self.colour))
        width = 0.8 if self.thin else 1.2 if self.dash == "dotted" else 1.8
        line.set(linestyle=self.dash, linewidth=width, alpha=0.6 if self.thin else 1)
        if len(self.finite) == 1 or (not self.thin and self.dash != "dotted" and len(self.finite) <= _MARKED_VALUES):
            line.set(marker="o", markersize=4)


class ChartBand(NamedTuple):
    """Area between two finite series of the same rounds."""

    low: RoundSeries
    high: RoundSeries
    colour: int = 1


@dataclass(frozen=True)
class RoundChart(Chart):
    """Lines and bands by round, or stacked bars; false without any value.

    Attributes:
        unit: Unit of the values.
        lines: Series; of a stacked chart from the bottom up.
        legend: Its entries.
        bands: Areas behind the lines.
        stacked: True for stacked bars in place of lines.
    """

    unit: str
    lines: Sequence[ChartLine]
    legend: Sequence[LegendEntry] = ()
    bands: Sequence[ChartBand] = ()
    stacked: bool = False

    def __bool__(self) -> bool:
        finite = [value for line in self.lines for value in line.finite.values()]
        return any(finite) if self.stacked else bool(finite)

    @cached_property
    def rounds(self) -> list[int]:
        return sorted({number for line in self.lines for number in line.finite})

    @property
    def begins_at_zero(self) -> bool:
        """True if the vertical axis begins at zero: unless the values lie far from it."""
        series = [line.finite for line in self.lines] + [side for band in self.bands for side in (band.low, band.high)]
        values = [value for each in series for value in each.values()]
        low, high = min(values), max(values)
        return self.stacked or 0 <= low < 0.6 * high or low == high >= 0

    def draw(self, axes: Axes) -> None:
        if self.stacked:
            self._draw_bars(axes)
        else:
            for line in self.lines:
                line.draw(axes)
        for band in self.bands:
            low, high = list(band.low.values()), list(band.high.values())
            axes.fill_between(list(band.low), low, high, color=chart_colour(band.colour), alpha=BAND, linewidth=0)
        axes.set(xlabel="round", ylabel=short_name(self.unit))
        if len(self.rounds) == 1:  # matplotlib would mark tenths of the round
            axes.set_xlim(self.rounds[0] - 0.5, self.rounds[0] + 0.5)
        if self.begins_at_zero:
            axes.set_ylim(bottom=0)
        figures.whole_rounds(axes)
        if self.legend:
            figures.legend_below(axes, columns=3, handles=[entry.handle() for entry in self.legend])
        table = self.values_table()
        for number, *cells in table.rows:
            shown = [f"{label}: {cell}" for label, cell in zip(table.columns[1:], cells, strict=True) if cell != "-"]
            left, text = int(number) - self._step / 2, "\n".join([f"round {number}", *shown])
            figures.show_on_hovering(axes, (left, 0.0, self._step, 1.0), text, axes.get_xaxis_transform())

    def values_table(self) -> TextTable:
        """Values by round; of a long run every few rounds."""
        rows = [
            # the rest of a report is about the last round
            (str(number), *(value_text(line.finite.get(number, math.nan)) for line in self.lines))
            for number in sorted({*self.rounds[:: self._step], self.rounds[-1]})
        ]
        every = f" (every {self._step} rounds)" if self._step > 1 else ""
        return TextTable(f"{self.title}, {self.unit}{every}", ("round", *(line.label for line in self.lines)), rows)

    @property
    def _step(self) -> int:
        return -(-len(self.rounds) // _MOST_TABLE_ROUNDS)

    def _draw_bars(self, axes: Axes) -> None:
        below = dict.fromkeys(self.rounds, 0.0)
        for line in self.lines:
            bottoms = [below[number] for number in line.finite]
            axes.bar(list(line.finite), list(line.finite.values()), 0.8, bottoms, color=chart_colour(line.colour))
            below |= {number: below[number] + value for number, value in line.finite.items()}


def stacked_chart(title: str, unit: str, parts: Mapping[str, RoundSeries]) -> RoundChart:
    """Bars by round, the parts on top of each other, the first at the bottom."""
    lines = [ChartLine(label, part, colour) for colour, (label, part) in enumerate(parts.items(), start=1)]
    return RoundChart(
        title, unit, lines, [LegendEntry(line.label, line.colour, "area") for line in lines], stacked=True
    )


# ---- charts of named rows: counts as colours, and horizontal bars


_MOST_CELLS = 500  # cells up to which values appear on hovering
_WRITTEN_CELLS = 80  # cells up to which counts are written into the map
_NAMED_COLUMNS = 30  # columns up to which all have their names below
_NAMED_ROWS = 60
_UNNAMED_INCHES = 3.0  # height of more rows than have names


@dataclass(frozen=True)
class CountMap(Chart):
    """Counts as colours.

    Attributes:
        rows: Name of each row.
        counts: Whole numbers [rows, columns].
        column: Label of the horizontal axis.
        columns: Name of each column.
        unit: Unit of the counts, next to the scale of colours.
        note: A sentence below.
    """

    rows: Sequence[str]
    counts: NDArray[np.int64]
    column: str
    columns: Sequence[str]
    unit: str
    note: str = ""

    @property
    def inches(self) -> tuple[float, float]:
        slanted = 0.055 * max(0, max(map(len, self._below.values()), default=0) - 8)
        width = min(8.0, 2.2 + 0.35 * len(self.columns)) + _inches_of_names(self.rows)
        return (width if len(self.columns) <= _NAMED_COLUMNS else 5.0), _inches_high(self.rows) + slanted

    def draw(self, axes: Axes) -> None:
        low, high = int(self.counts.min()), int(self.counts.max())
        image = axes.imshow(self.counts, aspect="auto", interpolation="nearest", cmap=figures.SEQUENTIAL)
        axes.figure.colorbar(image, ax=axes, label=short_name(self.unit))
        for (row, column), count in np.ndenumerate(
            self.counts if self.counts.size <= _MOST_CELLS else np.empty((0, 0))
        ):
            if self.counts.size <= _WRITTEN_CELLS:
                colour = "#000000" if count > low + 0.6 * (high - low) else "#fafafa"
                axes.text(column, row, f"{count:,}", ha="center", va="center", fontsize=7, color=colour)
            text = f"{self.rows[row]}, {self.columns[column]}: {count:,}"
            figures.show_on_hovering(axes, (column - 0.5, row - 0.5, 1.0, 1.0), text)
        axes.set_xticks(list(self._below), list(self._below.values()), rotation=40, ha="right")
        _name_rows(axes, self.rows, room=0)
        axes.set_xlabel("\n".join(filter(None, [self.column, wrapped(self.note, self.inches[0])])))
        axes.grid(visible=False)

    @property
    def _below(self) -> dict[int, str]:
        """Index -> name of the columns that are named below; of many columns only a few."""
        step = 1 if len(self.columns) <= _NAMED_COLUMNS else len(self.columns) // 8
        return {index: short_name(self.columns[index]) for index in range(0, len(self.columns), step)}


class BarPart(NamedTuple):
    """A piece of a bar: its length, label, colour and opacity (0 to 1), and an interval."""

    value: float
    label: str
    colour: int
    opacity: float = 1.0
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class BarRows(Chart):
    """Horizontal bars on one scale from zero.

    Attributes:
        rows: Heading of a row -> parts of its bar.
        amounts: Heading of a row -> text behind the bar.
        unit: Unit of the lengths, below the axis.
        legend: Its entries.
        marks: Heading of a row -> value with a dotted line across the row.
    """

    rows: Mapping[str, Sequence[BarPart]]
    amounts: Mapping[str, str]
    unit: str = ""
    legend: Sequence[LegendEntry] = ()
    marks: Mapping[str, float] = field(default_factory=dict)

    @property
    def inches(self) -> tuple[float, float]:
        return 3.8 + _inches_of_names(self.rows), _inches_high(self.rows)

    def draw(self, axes: Axes) -> None:
        for index, (name, parts) in enumerate(self.rows.items()):
            left = 0.0
            for part in parts:
                (bar,) = axes.barh(index, part.value, left=left, color=chart_colour(part.colour), height=0.7)
                bar.set(alpha=part.opacity, gid=figures.hover_id(f"{name}: {part.label}"))
                left += part.value
                if part.interval is not None:
                    axes.plot(part.interval, (index, index), color=figures.INK, linewidth=1.2, marker="|", markersize=5)
            right = max([left, *(part.interval[1] for part in parts if part.interval)])
            offset: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
            axes.annotate(self.amounts[name], (right, index), **offset)
            if name in self.marks:
                axes.vlines(self.marks[name], index - 0.5, index + 0.5, colors=chart_colour(2), linestyles="dotted")
        axes.margins(x=0.35)  # room for the amounts
        axes.set_xlim(left=0)
        axes.set_xlabel(self.unit)
        if self.legend:
            figures.legend_below(axes, columns=2, handles=[entry.handle() for entry in self.legend])
        _name_rows(axes, list(self.rows))
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")


def _inches_of_names(rows: Iterable[str]) -> float:
    """Width of the longest name beyond the space that every chart has."""
    return 0.08 * max(0, max((len(short_name(name)) for name in rows), default=0) - 12)


def _inches_high(rows: Sequence[str] | Mapping[str, object]) -> float:
    return 1.6 + (0.24 * len(rows) if len(rows) <= _NAMED_ROWS else _UNNAMED_INCHES)


def _name_rows(axes: Axes, names: Sequence[str], room: float = 0.1) -> None:
    step = -(-len(names) // _NAMED_ROWS) or 1
    axes.set_yticks(range(0, len(names), step), [short_name(name) for name in names[::step]])
    axes.set_ylim(len(names) - 0.5 + room, -0.5 - room)
