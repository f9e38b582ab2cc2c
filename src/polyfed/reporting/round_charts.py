"""Charts by round: lines with areas behind them, or bars that stand on each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from polyfed.reporting.charts import BAND, Chart, LegendEntry, chart_colour, short_name, value_text
from polyfed.reporting.figures import legend_below, show_on_hovering, whole_rounds
from polyfed.reporting.statistics import finite_values
from polyfed.reporting.tables import TextTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKED_VALUES = 25  # of more rounds the markers would hide the lines
_MOST_ROWS = 200  # rounds in the table of a chart

RoundSeries: TypeAlias = Mapping[int, float]


@dataclass(frozen=True)
class ChartLine:
    """Values by round, of which those that are not finite are left out.

    Attributes:
        label: name in tables and on hovering.
        values: round -> value.
        colour: from 1, or 0 for grey.
        dash: ``solid``, ``dashed`` or ``dotted``.
        thin: for one of many.
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
        is_main = not self.thin and self.dash != "dotted"
        if len(self.finite) == 1 or (is_main and len(self.finite) <= _MARKED_VALUES):
            line.set(marker="o", markersize=4)


class ChartBand(NamedTuple):
    """An area between two finite series of the same rounds."""

    low: RoundSeries
    high: RoundSeries
    colour: int = 1


@dataclass(frozen=True)
class RoundChart(Chart):
    """Lines and bands by round, or bars that stand on each other; false if there is nothing to draw.

    Attributes:
        unit: of the values.
        lines: the series; of a stacked chart from the ground upwards.
        legend: its entries.
        bands: areas behind the lines.
        stacked: whether the series are bars, one upon the other, instead of lines.
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
    def inches(self) -> tuple[float, float]:
        return 5.0, 3.6

    @property
    def begins_at_zero(self) -> bool:
        """Whether the axis does: always, unless the values lie far from it."""
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
        whole_rounds(axes)
        if self.legend:
            legend_below(axes, columns=4, handles=[entry.handle() for entry in self.legend])
        table = self.values_table()
        for number, *cells in table.rows:
            shown = [f"{label}: {cell}" for label, cell in zip(table.columns[1:], cells, strict=True) if cell != "-"]
            left, text = int(number) - self._step / 2, "\n".join([f"round {number}", *shown])
            show_on_hovering(axes, (left, 0.0, self._step, 1.0), text, axes.get_xaxis_transform())

    def values_table(self) -> TextTable:
        """The values, of a long run those of every so many rounds."""
        rows = [
            # the last round is what everything else in a report is about
            (str(number), *(value_text(line.finite.get(number, math.nan)) for line in self.lines))
            for number in sorted({*self.rounds[:: self._step], self.rounds[-1]})
        ]
        every = f" (every {self._step} rounds)" if self._step > 1 else ""
        return TextTable(f"{self.title}, {self.unit}{every}", ("round", *(line.label for line in self.lines)), rows)

    @property
    def _step(self) -> int:
        return -(-len(self.rounds) // _MOST_ROWS)

    def _draw_bars(self, axes: Axes) -> None:
        below = dict.fromkeys(self.rounds, 0.0)
        for line in self.lines:
            bottoms = [below[number] for number in line.finite]
            axes.bar(list(line.finite), list(line.finite.values()), 0.8, bottoms, color=chart_colour(line.colour))
            below |= {number: below[number] + value for number, value in line.finite.items()}


def stacked_chart(title: str, unit: str, parts: Mapping[str, RoundSeries], first_colour: int = 1) -> RoundChart:
    """Bars by round, the parts one upon the other from the first at the ground."""
    lines = [ChartLine(label, part, colour) for colour, (label, part) in enumerate(parts.items(), first_colour)]
    legend = [LegendEntry(line.label, line.colour, "area") for line in lines] if len(lines) > 1 else []
    return RoundChart(title, unit, lines, legend, stacked=True)
