"""What a figure shows, apart from how it is drawn.

A run's curves, maps and bars are described once, with these classes. ``plots`` draws them with matplotlib for PNG
files, ``html`` as inline SVG for pages, and notebooks show a ``FigureSheet`` by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from polyfed.core.files import write_atomically

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_DRAWN = 1e100
"""Magnitude beyond which values are drawn no more than infinite ones are: sums and squares of them must be finite."""

_Key = TypeVar("_Key")
RoundSeries: TypeAlias = Mapping[int, float]


@dataclass(frozen=True)
class ChartLine:
    """Values by round, of which those that are not finite are left out.

    Attributes:
        label: name in tables and beside the pointer.
        values: round -> value.
        keys: legend entries that it belongs to; a page hides it while one of them is switched off.
        colour: from 1, or 0 for grey.
        dash: ``solid``, ``dashed`` or ``dotted``.
        thin: for one of many.
        listed: whether it stands beside the pointer and in the table.
    """

    label: str
    values: RoundSeries
    keys: tuple[str, ...]
    colour: int = 1
    dash: str = "solid"
    thin: bool = False
    listed: bool = True

    @cached_property
    def finite(self) -> dict[int, float]:
        return finite_values(self.values)


class ChartBand(NamedTuple):
    """An area between two finite series of the same rounds."""

    low: RoundSeries
    high: RoundSeries
    keys: tuple[str, ...]
    colour: int = 1


class LegendEntry(NamedTuple):
    """An entry of a legend; ``mark`` is its sample: ``solid``, ``dashed``, ``dotted``, ``area`` or ``band``."""

    label: str
    colour: int = 0
    mark: str = "solid"


@dataclass(frozen=True)
class RoundChart:
    """Lines and bands by round, or bars that stand on each other; false if there is nothing to draw.

    Attributes:
        title: what is shown.
        unit: of the values.
        lines: the series; of a stacked chart from the ground upwards.
        legend: its entries.
        bands: areas behind the lines.
        stacked: whether the series are bars, one upon the other, instead of lines.
    """

    title: str
    unit: str
    lines: Sequence[ChartLine]
    legend: Sequence[LegendEntry] = ()
    bands: Sequence[ChartBand] = ()
    stacked: bool = False

    def __bool__(self) -> bool:
        if self.stacked:
            return any(total > 0 for total in self.totals.values())
        return any(line.finite for line in self.lines)

    @cached_property
    def rounds(self) -> list[int]:
        return sorted({number for line in self.lines for number in line.finite})

    @cached_property
    def totals(self) -> dict[int, float]:
        return {number: sum(line.finite.get(number, 0.0) for line in self.lines) for number in self.rounds}

    @cached_property
    def value_range(self) -> tuple[float, float]:
        """Lowest and highest value; from zero, unless the values lie far from it."""
        if self.stacked:
            return 0.0, max(self.totals.values())
        series = [line.finite for line in self.lines] + [side for band in self.bands for side in (band.low, band.high)]
        # ends of a scale must be values that are seen; infinite ones are dropped before
        values = [value for each in series for value in each.values()]
        low, high = min(values), max(values)
        return (0.0 if 0 <= low < 0.6 * high or low == high >= 0 else low), high


class HeatMapFrame(NamedTuple):
    """Names of the rows, and values [rows, columns] of one round; NaN where there is no value."""

    rows: Sequence[str]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class HeatMap:
    """Values of several rounds on one scale.

    Attributes:
        title: what the colours mean.
        frames: round -> its values; all have the same columns. PNG files show the last round.
        column: what a column is.
        columns: name of each column.
        note: a sentence below.
        limits: lowest and highest value of the scale, by default those of all frames.
        labels: [rows, columns], written into the cells of a PNG file; none if empty.
    """

    title: str
    frames: Mapping[int, HeatMapFrame]
    column: str
    columns: Sequence[str]
    note: str = ""
    limits: tuple[float, float] | None = None
    labels: Sequence[Sequence[str]] = ()

    @property
    def last(self) -> HeatMapFrame:
        return self.frames[max(self.frames)]

    @cached_property
    def scale(self) -> tuple[float, float]:
        if self.limits is not None:
            return self.limits
        import numpy as np  # takes a quarter of a second, and displays of a run need no map

        finite = np.concatenate([frame.values[np.abs(frame.values) <= MOST_DRAWN] for frame in self.frames.values()])
        return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


class BarPart(NamedTuple):
    """A piece of a bar: how long, what it stands for, its colour, and how strong that is (0 to 1)."""

    value: float
    label: str
    colour: int
    strength: float = 1.0


@dataclass(frozen=True)
class BarRows:
    """Horizontal bars on one scale from zero.

    Attributes:
        title: what the bars show.
        rows: heading of a row -> parts of its bar.
        amounts: heading of a row -> what stands behind the bar.
        heading: what the rows are.
        unit: of the lengths, below the axis of a plot.
    """

    title: str
    rows: Mapping[str, Sequence[BarPart]]
    amounts: Mapping[str, str]
    heading: str
    unit: str = ""

    @property
    def longest(self) -> float:
        """Length of the longest bar, 1 if all are empty."""
        return max((sum(part.value for part in parts) for parts in self.rows.values()), default=0.0) or 1.0


@dataclass(frozen=True)
class BubbleChart:
    """Counts by row and column as areas; a page, which shows values on hovering, draws them as a map.

    Attributes:
        title: what is counted.
        rows: name of each row.
        column: what the columns are.
        columns: name of each column.
        counts: [rows, columns].
        colour: of the bubbles.
        named: names of the columns as they stand below the axis; none where there is no room for them.
    """

    title: str
    rows: Sequence[str]
    column: str
    columns: Sequence[str]
    counts: NDArray[np.int64]
    colour: int
    named: Sequence[str]

    @property
    def as_map(self) -> HeatMap:
        return HeatMap(self.title, {0: HeatMapFrame(self.rows, self.counts.astype(float))}, "class", self.columns)


SheetChart: TypeAlias = RoundChart | HeatMap | BarRows | BubbleChart


@dataclass(frozen=True)
class FigureSheet:
    """A figure: charts in rows beside each other. A notebook shows it with values on hovering."""

    title: str
    rows: Sequence[Sequence[SheetChart]]

    # notebooks prefer HTML; the PNG is for those that show none, and for export to paper
    def _repr_html_(self) -> str:
        from polyfed.reporting.html.page import notebook_html

        return notebook_html(self)

    def _repr_png_(self) -> bytes:
        from polyfed.reporting.figures import png_bytes
        from polyfed.reporting.plots import draw_sheet

        return png_bytes(draw_sheet(self))

    def save(self, path: Path | str) -> Path:
        """Write it as a PNG file, complete or not at all; returns the path."""
        write_atomically(Path(path), self._repr_png_())
        return Path(path)


def stacked_chart(title: str, unit: str, parts: Mapping[str, RoundSeries], first_colour: int = 1) -> RoundChart:
    """Bars by round, the parts one upon the other from the first at the ground."""
    lines = [
        ChartLine(label, part, (label,), colour) for colour, (label, part) in enumerate(parts.items(), first_colour)
    ]
    legend = [LegendEntry(line.label, line.colour, "area") for line in lines] if len(lines) > 1 else []
    return RoundChart(title, unit, lines, legend, stacked=True)


def sheet_of(title: str, charts: Sequence[SheetChart], columns: int = 3) -> FigureSheet | None:
    """Charts in rows of so many; None where there are none."""
    rows = [charts[start : start + columns] for start in range(0, len(charts), columns)]
    return FigureSheet(title, rows) if rows else None


def finite_values(values: Mapping[_Key, float]) -> dict[_Key, float]:
    """The values that can be drawn: no NaN, and none beyond ``MOST_DRAWN``."""
    return {key: value for key, value in values.items() if abs(value) <= MOST_DRAWN}
