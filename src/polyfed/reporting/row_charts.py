"""Charts of named rows: maps of values as colours, and horizontal bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from polyfed.reporting.charts import Chart, LegendEntry, chart_colour, short_name, value_text, wrapped
from polyfed.reporting.figures import SEQUENTIAL, hover_id, legend_below, show_on_hovering
from polyfed.reporting.statistics import MOST_DRAWN

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

_MOST_CELLS = 500  # that show their values on hovering
_NAMED_COLUMNS = 30  # up to so many columns of a map have their names below
_NAMED_ROWS = 60
_UNNAMED_INCHES = 3.0  # height of more rows than have names


@dataclass(frozen=True)
class HeatMap(Chart):
    """Values as colours.

    Attributes:
        rows: name of each row.
        values: [rows, columns], NaN where there is no value.
        column: what a column is.
        columns: name of each column.
        note: a sentence below.
        limits: lowest and highest value of the scale, by default those of the values.
        scale: what stands beside the scale of colours, which is left out if this is empty.
        labels: [rows, columns], written into the cells; none if empty.
    """

    rows: Sequence[str]
    values: NDArray[np.float64]
    column: str
    columns: Sequence[str]
    note: str = ""
    limits: tuple[float, float] | None = None
    scale: str = ""
    labels: Sequence[Sequence[str]] = ()

    @property
    def inches(self) -> tuple[float, float]:
        slanted = 0.055 * max(0, max(map(len, self._below.values()), default=0) - 8)
        width = min(8.0, 2.5 + 0.5 * len(self.columns)) + _inches_of_names(self.rows)
        return (width if len(self.columns) <= _NAMED_COLUMNS else 5.0), _inches_high(self.rows) + slanted

    @property
    def row_names(self) -> Sequence[str]:
        return self.rows

    def draw(self, axes: Axes) -> None:
        import numpy as np

        drawn = np.where(np.abs(self.values) <= MOST_DRAWN, self.values, np.nan)
        low, high = self.limits or limits_of(self.values)
        axes.patch.set(hatch="///", edgecolor="#bbbbbb")  # shows through where there is no value
        image = axes.imshow(drawn, aspect="auto", interpolation="nearest", cmap=SEQUENTIAL, vmin=low, vmax=high)
        if self.scale:
            axes.figure.colorbar(image, ax=axes, label=short_name(self.scale))
        for place, row in enumerate(self.labels):
            for column, text in enumerate(row):
                colour = "black" if drawn[place, column] > low + 0.6 * (high - low) else "white"
                axes.text(column, place, text, ha="center", va="center", fontsize=7, color=colour)
        axes.set_xticks(list(self._below), list(self._below.values()), rotation=40, ha="right")
        _name_rows(axes, self.rows, room=0)
        axes.set_xlabel("\n".join(filter(None, [self.column, wrapped(self.note, self.inches[0])])))
        axes.grid(visible=False)
        _show_values(axes, self.rows, self.columns, drawn)

    @property
    def _below(self) -> dict[int, str]:
        """Place -> name of the columns that are named below; of many columns only a few."""
        step = 1 if len(self.columns) <= _NAMED_COLUMNS else len(self.columns) // 8
        return {place: short_name(self.columns[place]) for place in range(0, len(self.columns), step)}


def limits_of(values: NDArray[np.float64]) -> tuple[float, float]:
    """Lowest and highest value that can be drawn, 0 if there is none."""
    import numpy as np  # takes a quarter of a second, and displays of a run need no map

    drawn = values[np.abs(values) <= MOST_DRAWN]
    return (float(drawn.min()), float(drawn.max())) if drawn.size else (0.0, 0.0)


class BarPart(NamedTuple):
    """A piece of a bar: how long, what it stands for, its colour, and how strong that is (0 to 1)."""

    value: float
    label: str
    colour: int
    strength: float = 1.0


@dataclass(frozen=True)
class BarRows(Chart):
    """Horizontal bars on one scale from zero.

    Attributes:
        rows: heading of a row -> parts of its bar.
        amounts: heading of a row -> what stands behind the bar.
        unit: of the lengths, below the axis.
        legend: its entries.
    """

    rows: Mapping[str, Sequence[BarPart]]
    amounts: Mapping[str, str]
    unit: str = ""
    legend: Sequence[LegendEntry] = ()

    @property
    def inches(self) -> tuple[float, float]:
        return 4.0 + _inches_of_names(self.rows), _inches_high(self.rows)

    @property
    def row_names(self) -> Sequence[str]:
        return list(self.rows)

    def draw(self, axes: Axes) -> None:
        for place, (name, parts) in enumerate(self.rows.items()):
            left = 0.0
            for part in parts:
                (bar,) = axes.barh(place, part.value, left=left, color=chart_colour(part.colour), height=0.7)
                bar.set(alpha=part.strength, gid=hover_id(f"{name}: {part.label}"))
                left += part.value
            behind = self.amounts[name]
            axes.annotate(behind, (left, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.margins(x=0.35)  # room for the amounts
        axes.set_xlim(left=0)
        axes.set_xlabel(self.unit)
        if self.legend:
            legend_below(axes, columns=2, handles=[entry.handle() for entry in self.legend])
        _name_rows(axes, list(self.rows))
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")


def _inches_of_names(rows: Iterable[str]) -> float:
    """Width that the longest name takes beyond what every chart has room for."""
    return 0.08 * max(0, max((len(short_name(name)) for name in rows), default=0) - 12)


def _inches_high(rows: Sequence[str] | Mapping[str, object]) -> float:
    return 1.6 + (0.24 * len(rows) if len(rows) <= _NAMED_ROWS else _UNNAMED_INCHES)


def _name_rows(axes: Axes, names: Sequence[str], room: float = 0.1) -> None:
    step = -(-len(names) // _NAMED_ROWS) or 1
    axes.set_yticks(range(0, len(names), step), [short_name(name) for name in names[::step]])
    axes.set_ylim(len(names) - 0.5 + room, -0.5 - room)


def _show_values(axes: Axes, rows: Sequence[str], columns: Sequence[str], values: NDArray[np.float64]) -> None:
    """The finite value under the pointer; of many cells the range of their row."""
    import numpy as np

    if values.size <= _MOST_CELLS:
        for (row, column), value in np.ndenumerate(values):
            text = f"{rows[row]}, {columns[column]}: {value_text(float(value))}"
            show_on_hovering(axes, (column - 0.5, row - 0.5, 1.0, 1.0), text)
        return
    for row, name in enumerate(rows if len(rows) <= _NAMED_ROWS else ()):
        finite = values[row][np.isfinite(values[row])]
        ends = f"{value_text(float(finite.min()))} to {value_text(float(finite.max()))}" if finite.size else "-"
        show_on_hovering(axes, (-0.5, row - 0.5, len(columns), 1.0), f"{name}: {ends}")
