"""Plots of Shapley values and of scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyfed.analysis.scaling import Scaling
from polyfed.analysis.shapley import Contributions
from polyfed.reporting.compare import Spread
from polyfed.reporting.figures import COLOURS, GREY, figure_grid, styled
from polyfed.reporting.tables import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@styled
def draw_shapley(found: Contributions) -> Figure:
    """Left the Shapley values, right the utility of every coalition; whiskers: standard deviation over seeds."""
    drawing, (left, right) = figure_grid(1, 2, title=f"Who contributes to {found.metric}")
    _bars(left, list(found.spreads), list(found.spreads.values()), COLOURS[0])
    left.set(title="Shapley value", ylabel=f"share of the gain in {found.metric}")
    utilities = [Spread.of(list(by_seed.values())) for by_seed in found.utilities.values()]
    _bars(right, list(found.utilities), utilities, GREY)
    right.set(title="with these clients", ylabel=found.metric)
    return drawing


@styled
def draw_scaling(found: Scaling) -> Figure:
    """Mean of the metric by number of steps, its standard deviation, and every seed."""
    drawing, (axes,) = figure_grid(1, 1, title=f"More groups of clients: {found.metric}")
    spreads, steps = found.spreads, range(len(found.values))
    axes.errorbar(steps, [s.mean for s in spreads], yerr=_whiskers(spreads), color=COLOURS[0], marker="o", capsize=4)
    for number, by_seed in enumerate(found.values.values()):
        axes.plot([number] * len(by_seed), list(by_seed.values()), ".", color=GREY, markersize=5)
    axes.set_xticks(steps, ["none", *("+ " + " and ".join(step) for step in found.steps)])
    axes.tick_params(axis="x", rotation=20)
    axes.set(xlabel="groups that joined", ylabel=found.metric)
    return drawing


def _bars(axes: Axes, names: Sequence[str], spreads: Sequence[Spread], colour: str) -> None:
    places = range(len(names))
    axes.bar(places, [s.mean for s in spreads], yerr=_whiskers(spreads), color=colour, capsize=4, width=0.6)
    axes.axhline(0, color="black", linewidth=0.8)
    for place, spread in zip(places, spreads, strict=True):
        axes.annotate(figure(spread.mean), (place, spread.mean), (12, 3), textcoords="offset points", fontsize=8)
    axes.set_xticks(places, list(names))
    axes.tick_params(axis="x", rotation=20)


def _whiskers(spreads: Sequence[Spread]) -> list[float]:
    return [0.0 if math.isnan(spread.std) else spread.std for spread in spreads]
