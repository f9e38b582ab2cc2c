"""Drawings of analyses: matrices as heat maps and points on planes, in panels of one figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from polyfed.lab.analysis.analysis import AnalysisResult
from polyfed.reporting.figures import COLOURS, SEQUENTIAL, figure_grid, legend_below, styled
from polyfed.reporting.tables import TextTable, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^Dv<>P"
_DIVERGING = "PuOr"  # orange and violet, which colour-blind readers distinguish too
_MOST_WRITTEN = 12  # columns of a heat map up to which the cells have their figures in them
_LEGEND = 2  # names side by side below a map
_MOST_NAMED = 14  # groups of points up to which a map has a legend


@dataclass(frozen=True)
class Matrix:
    """Figures by row and column, as a table and as a heat map.

    Attributes:
        title: one line.
        corner: heading of the rows' names.
        rows, columns: names; none leaves the ticks out.
        values: finite numbers or NaN [rows, columns].
        digits: decimals.
        limits: of the colours; None: those of the values.
        is_change: whether colours diverge from 0.
        notes: below the table.
    """

    title: str
    corner: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Any
    digits: int = 2
    limits: tuple[float, float] | None = None
    is_change: bool = False
    notes: Sequence[str] = ()

    def table(self) -> TextTable:
        lines = [
            (name, *(format_number(float(value), self.digits) for value in values))
            for name, values in zip(self.rows, self.values, strict=True)
        ]
        return TextTable(self.title, (self.corner, *self.columns), lines, self.notes)

    def draw(self, axes: Axes) -> None:
        """Draw a heat map with a colour bar; figures are written in the cells of narrow ones."""
        import numpy as np

        values = np.asarray(self.values, dtype=float)
        finite = values[np.isfinite(values)]
        low, high = self.limits or ((finite.min(), finite.max()) if finite.size else (0.0, 1.0))
        if self.is_change:
            high = abs(finite).max(initial=0.0) or 1.0
            low = -high
        colours = _DIVERGING if self.is_change else SEQUENTIAL
        image = axes.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        axes.figure.colorbar(image, ax=axes, shrink=0.9)
        axes.set_xticks(range(len(self.columns)), self.columns, rotation=90)
        axes.set_yticks(range(len(self.rows)), self.rows)
        axes.grid(visible=False)
        if values.shape[1] > _MOST_WRITTEN:
            return
        for (row, column), value in np.ndenumerate(values):
            # dark cells are the low end of a sequential map, and both ends of a diverging one
            dark = abs(value) > 0.6 * high if self.is_change else value < (low + high) / 2
            look: Any = {"ha": "center", "va": "center", "fontsize": 7, "color": "white" if dark else "black"}
            axes.text(column, row, format_number(float(value), self.digits), **look)


@dataclass(frozen=True)
class PointMap:
    """Groups of points on a plane.

    Attributes:
        title: one line.
        groups: name -> points [k, 2].
        has_centres: whether the mean of each group has a large mark.
    """

    title: str
    groups: Mapping[str, Float[Tensor, "_ 2"]]
    has_centres: bool = False

    def draw(self, axes: Axes) -> None:
        """Draw a colour and marker for each group; the markers change when all colours are used."""
        for number, (name, points) in enumerate(self.groups.items()):
            marker = _MARKERS[number // len(COLOURS) % len(_MARKERS)]
            look: Any = {"color": COLOURS[number % len(COLOURS)], "marker": marker, "linewidths": 0}
            axes.scatter(points[:, 0], points[:, 1], s=9, alpha=0.6, label=name, **look)
            if self.has_centres:
                x, y = points.mean(0).tolist()
                axes.scatter([x], [y], s=110, **look | {"edgecolors": "black", "linewidths": 1})
        axes.set_xticks([])
        axes.set_yticks([])
        axes.grid(visible=False)
        if self.has_legend:
            legend_below(axes, columns=_LEGEND, markerscale=2)

    @property
    def has_legend(self) -> bool:
        return len(self.groups) <= _MOST_NAMED


@styled
def draw_panels(title: str, panels: Sequence[Matrix | PointMap], columns: int) -> Figure:
    """One figure with a panel for each, so many side by side."""
    longest = max((len(panel.rows) for panel in panels if isinstance(panel, Matrix)), default=0)
    named = max((len(panel.groups) for panel in panels if isinstance(panel, PointMap) and panel.has_legend), default=0)
    height = max(3.6 + 0.25 * math.ceil(named / _LEGEND), 1.6 + 0.3 * min(longest, 60))
    drawing, axes = figure_grid(math.ceil(len(panels) / columns), columns, height=height, title=title)
    for where, panel in zip(axes, panels, strict=False):
        panel.draw(where)
        where.set_title(panel.title)
    for where in axes[len(panels) :]:
        where.set_axis_off()
    return drawing


def matrices_result(title: str, figures: dict[str, Any], matrices: Sequence[Matrix]) -> AnalysisResult:
    """Figures with a table for each matrix, and all matrices next to each other in one image."""
    tables = [matrix.table() for matrix in matrices]
    return AnalysisResult(figures, tables, partial(draw_panels, title, matrices, len(matrices)))
