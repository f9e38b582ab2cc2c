"""Plots of re-training, distortion and models across clients: heat maps of who trained and who judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyfed.analysis.across import Across, Table
from polyfed.analysis.distortion import Distortion
from polyfed.analysis.retraining import Retrained, Retraining, mean_of
from polyfed.analysis.retraining_tables import SHOWN
from polyfed.reporting.figures import SEQUENTIAL, empty_figure, styled
from polyfed.reporting.tables import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BETTER, _WORSE = "PuOr", "PuOr_r"  # above 0 is good, or bad, which is orange; colour-blind readers see it too
_WRITTEN = 12  # columns up to which each cell has its figure in it


@styled
def draw_retraining(found: Retraining) -> Figure:
    """Change of each figure by model and samples, at each client and on average."""
    names, rows = found.figures[:SHOWN], [f"{row.of}, on {row.on}" for row in found.rows]
    columns = [*found.clients, "average"]
    drawing, axes = _maps(len(names), len(rows), len(columns), f"{found.run}: {found.plan.layers} layers re-trained")
    for place, name in zip(axes, names, strict=True):
        _heat(place, [_changes(row, name) for row in found.rows], rows, columns, _BETTER)
        place.set_title(f"change of {name}")
    return drawing


@styled
def draw_distortion(found: Distortion) -> Figure:
    """Left by how much the similarity of pairs fell, right how the first figure changed."""
    name = next(iter(found.before.figures[found.clients[0]]))
    columns, rows = list(found.clients), [f"on {client}" for client in found.clients]
    decrease = [[found.decrease(a, b) for b in found.clients] for a in found.clients]
    drawing, (left, right) = _maps(2, len(rows) + 1, len(columns), f"{found.run}: local training from {found.of}")
    mean = [found.mean_decrease(client) for client in columns]
    _heat(left, [*decrease, mean], [*rows, "average"], columns, _WORSE, digits=3)
    left.set_title("decrease of the similarity of pairs")
    before = [found.before.figures[client][name] for client in columns]
    after = [[seen.figures[client][name] for client in columns] for seen in found.after.values()]
    after.append([found.mean_figure(client, name) for client in columns])
    changes = [[new - old for new, old in zip(line, before, strict=True)] for line in after]
    _heat(right, changes, [*rows, "average"], columns, _BETTER)
    right.set_title(f"change of {name}")
    return drawing


@styled
def draw_across(found: Across) -> Figure:
    """A row for each set of clients: every model at every client, a map a figure."""
    most = max(len(table.rows) for table in found.tables)
    widest = max(len(table.clients) for table in found.tables) + 1
    drawing = empty_figure(_width(widest) * SHOWN, _height(most) * len(found.tables), f"{found.run}: models at clients")
    grid = drawing.subplots(len(found.tables), SHOWN, squeeze=False)
    for line, table in zip(grid, found.tables, strict=True):
        _across(line, table)
    return drawing


def _across(axes: Sequence[Axes], table: Table) -> None:
    names = table.names[:SHOWN]
    for place, name in zip(axes, names, strict=False):
        values = [[*model.values(name), mean_of(model.figures, name)] for model in table.rows]
        _heat(place, values, [model.name for model in table.rows], [*table.clients, "average"], SEQUENTIAL)
        place.set_title(name)
    for place in axes[len(names) :]:
        place.set_axis_off()


def _changes(row: Retrained, name: str) -> list[float]:
    average = mean_of(row.after, name) - mean_of(row.before, name)
    return [*(row.change(client, name) for client in row.after), average]


def _maps(count: int, rows: int, columns: int, title: str) -> tuple[Figure, list[Axes]]:
    drawing = empty_figure(_width(columns) * count, _height(rows), title)
    return drawing, list(drawing.subplots(1, count, squeeze=False).flat)


def _width(columns: int) -> float:
    return 2.8 + max(2.4, 0.55 * min(columns, 30))


def _height(rows: int) -> float:
    return 1.6 + max(1.6, 0.35 * min(rows, 60))


def _heat(
    axes: Axes,
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    colours: str,
    *,
    digits: int = 1,
) -> None:
    signed = colours != SEQUENTIAL
    finite = [value for line in values for value in line if math.isfinite(value)]
    most = max((abs(value) for value in finite), default=0.0) or 1.0
    low, high = (-most, most) if signed else (min(finite, default=0.0), max(finite, default=1.0))
    image = axes.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, shrink=0.9)
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.set_yticks(range(len(rows)), rows)
    axes.grid(visible=False)
    if len(columns) > _WRITTEN:
        return
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            dark = abs(value) > 0.6 * most if signed else value < (low + high) / 2
            colour = "white" if dark else "black"
            axes.text(column, row, figure(value, digits), ha="center", va="center", fontsize=7, color=colour)
