"""Charts of runs, and figures of several: one figure is in a run's plots, on the pages of reports, and in notebooks."""

from __future__ import annotations

import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from polyfed.core.files import write_atomically
from polyfed.reporting.figures import COLOURS, GREY, empty_figure, png_bytes, styled, svg_text
from polyfed.reporting.markup import printable
from polyfed.reporting.tables import TextTable, format_number

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

BAND = 0.15
"""Strength of the colour of an area behind lines."""

_LONGEST_NAME = 40  # letters


@dataclass(frozen=True)
class Chart(ABC):
    """A part of a figure with axes of its own.

    Attributes:
        title: what is shown.
    """

    title: str

    @property
    @abstractmethod
    def inches(self) -> tuple[float, float]:
        """Width and height."""

    @property
    def row_names(self) -> Sequence[str]:
        """Names at the left; charts beside each other with the same names have them once."""
        return ()

    @abstractmethod
    def draw(self, axes: Axes) -> None:
        """Draw all but the title."""

    def values_table(self) -> TextTable | None:
        """The values in figures, where they are not written into the chart."""
        return None


class LegendEntry(NamedTuple):
    """An entry of a legend; ``mark`` is its sample: ``solid``, ``dashed``, ``dotted``, ``area`` or ``band``."""

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
    """A figure: charts in rows beside each other, each row as high as its highest chart needs."""

    title: str
    rows: Sequence[Sequence[Chart]]

    @styled
    def draw(self) -> Figure:
        heights = [max(chart.inches[1] for chart in row) for row in self.rows]
        width = max(sum(chart.inches[0] for chart in row) for row in self.rows)
        drawing = empty_figure(width, sum(heights) + 0.4, self.title)
        parts = drawing.subfigures(len(self.rows), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, row in zip(parts, self.rows, strict=True):
            _draw_row(part, row, width)
        return drawing

    @cached_property
    def _drawn(self) -> Figure:
        return self.draw()

    @cached_property
    def svg(self) -> str:
        """For a page: values appear on hovering."""
        return svg_text(self._drawn, self.title)

    @property
    def tables(self) -> list[TextTable]:
        """The values of the charts."""
        return [table for row in self.rows for chart in row if (table := chart.values_table()) is not None]

    # notebooks prefer HTML; the PNG is for those that show none, and for export to paper
    def _repr_html_(self) -> str:
        return self.svg

    def _repr_png_(self) -> bytes:
        return png_bytes(self._drawn)

    def save(self, path: Path | str) -> Path:
        """Write it as a PNG file, complete or not at all; returns the path."""
        write_atomically(Path(path), self._repr_png_())
        return Path(path)


def sheet_of(title: str, charts: Sequence[Chart], columns: int = 3) -> FigureSheet | None:
    """Charts in rows of so many; None where there are none."""
    rows = [charts[start : start + columns] for start in range(0, len(charts), columns)]
    return FigureSheet(title, rows) if rows else None


def _draw_row(part: SubFigure, row: Sequence[Chart], width: float) -> None:
    """Charts beside each other; those of a short row are as wide as those above."""
    widths = [chart.inches[0] for chart in row]
    unused = width - sum(widths)
    ratios = [*widths, unused] if unused > 0.5 else widths
    places = part.subplots(1, len(ratios), width_ratios=ratios, squeeze=False)[0]
    names: Sequence[str] = ()
    for axes, chart, inches in zip(places, row, widths, strict=False):
        axes.set_title(wrapped(chart.title, inches))
        chart.draw(axes)
        if names and chart.row_names == names:
            axes.tick_params(labelleft=False)
        names = chart.row_names
    for axes in places[len(row) :]:
        axes.set_axis_off()


def chart_colour(number: int) -> str:
    return COLOURS[(number - 1) % len(COLOURS)] if number else GREY


def value_text(value: float) -> str:
    return format_number(value) if abs(value) >= 1 or value == 0 or math.isnan(value) else f"{value:.3g}"


def short_name(name: str) -> str:
    name = printable(name)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def wrapped(text: str, inches: float) -> str:
    """As wide as the axes, at most three lines."""
    return textwrap.fill(printable(text), round(11 * inches), max_lines=3, placeholder=" …")
