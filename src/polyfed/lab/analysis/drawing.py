"""What the figures of several analyses share: heat maps with figures in their cells, maps of points, and legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyfed.reporting.figures import COLOURS, SEQUENTIAL
from polyfed.reporting.tables import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "os^Dv<>P"
DIVERGING = "PuOr"  # orange and violet, which colour-blind readers tell apart too
MOST_WRITTEN = 12  # columns of a heat map up to which the cells have their figures in them


def heat_map(
    axes: Axes,
    values: Any,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    colours: str = SEQUENTIAL,
    limits: tuple[float, float] | None = None,
    digits: int = 2,
    label: str = "",
) -> None:
    """Draw ``values`` [rows, columns] with a colour bar; figures are written in the cells of narrow maps.

    Args:
        axes: where.
        values: finite numbers or NaN.
        rows, columns: names at the ticks; none leaves the ticks out.
        colours: name of the colour map. All but ``SEQUENTIAL`` diverge: the middle is 0.
        limits: of the colours; by default those of the values.
        digits: decimals in the cells.
        label: of the colour bar.
    """
    import numpy as np

    values = np.asarray(values, dtype=float)
    finite = values[np.isfinite(values)]
    if limits is None and colours != SEQUENTIAL:
        most = abs(finite).max(initial=0.0) or 1.0
        limits = (-most, most)
    low, high = limits or ((finite.min(), finite.max()) if finite.size else (0.0, 1.0))
    image = axes.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, shrink=0.9, label=label)
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.set_yticks(range(len(rows)), rows)
    axes.grid(visible=False)
    if values.shape[1] > MOST_WRITTEN:
        return
    middle = (low + high) / 2
    for (row, column), value in np.ndenumerate(values):
        # dark cells are the low end of a sequential map, and both ends of a diverging one
        dark = value < middle if colours == SEQUENTIAL else abs(value) > 0.6 * high
        look: Any = {"ha": "center", "va": "center", "fontsize": 7, "color": "white" if dark else "black"}
        axes.text(column, row, figure(float(value), digits), **look)


def bare_map(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)


def cycled(place: int, colours: Sequence[str] = COLOURS) -> dict[str, str]:
    """Colour and marker of the group with this number; the markers change when all colours are used."""
    return {
        "color": colours[place % len(colours)],
        "marker": MARKERS[place // len(colours) % len(MARKERS)],
    }


def patches(names: Sequence[str]) -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color=COLOURS[place % len(COLOURS)], label=name) for place, name in enumerate(names)]
