"""A picture of what probes found: a panel a task."""

from __future__ import annotations

import math
from itertools import cycle
from typing import TYPE_CHECKING

from polyfed.downstream.results import Findings, Outcome
from polyfed.reporting.figures import COLOURS, figure_grid, legend_below, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST = 6  # metrics in a panel; the others are in the tables


@styled
def draw_findings(found: Findings) -> Figure:
    """Bars by condition, a colour a metric; whiskers are standard deviations over draws."""
    columns = min(3, len(found.outcomes))
    rows = math.ceil(len(found.outcomes) / columns)
    drawing, panels = figure_grid(rows, columns, title=found.subject)
    for axes, (task, outcome) in zip(panels, found.outcomes.items(), strict=False):
        _bars(axes, outcome)
        axes.set(title=f"{task} ({found.probes[task]})", ylabel="percent")
    for axes in panels[len(found.outcomes) :]:
        axes.set_axis_off()
    return drawing


def _bars(axes: Axes, outcome: Outcome) -> None:
    metrics = list(outcome.rows[0].values)[:_MOST]
    width = 0.8 / len(metrics)
    for number, (metric, colour) in enumerate(zip(metrics, cycle(COLOURS), strict=False)):
        spreads = [row.spreads[metric] for row in outcome.rows]
        places = [k + (number - (len(metrics) - 1) / 2) * width for k in range(len(spreads))]
        whiskers = [0.0 if math.isnan(spread.std) else spread.std for spread in spreads]
        label = metric.replace("_", " ")
        axes.bar(places, [s.mean for s in spreads], width, yerr=whiskers, color=colour, label=label, capsize=2)
    axes.set_xticks(range(len(outcome.rows)), [row.on for row in outcome.rows])
    axes.tick_params(axis="x", rotation=30 if len(outcome.rows) > 3 else 0)
    legend_below(axes, 2)
