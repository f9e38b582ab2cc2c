"""What crossed the wire and how long it took, round by round."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from polyfed.reporting.figures import COLOURS, figure_grid, legend_below, styled, whole_rounds
from polyfed.reporting.tables import MIB
from polyfed.runs.records import RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DIRECTIONS = {"down": "server to clients", "up": "clients to server"}


@styled
def draw_traffic(records: RunRecords) -> Figure | None:
    """MiB of each round by direction, their running sums, and seconds a round."""
    panels = ([_draw_rounds, _draw_totals] if records.transfers else []) + ([_draw_seconds] if records.seconds else [])
    if not panels:
        return None
    figure, axes = figure_grid(1, len(panels), title=f"{records.name}: communication and time")
    for place, draw in zip(axes, panels, strict=True):
        draw(place, records)
        place.set_xlabel("round")
        place.set_ylim(bottom=0)
        whole_rounds(place)
    return figure


def _draw_rounds(axes: Axes, records: RunRecords) -> None:
    below: dict[int, float] = {}
    for (direction, label), colour in zip(_DIRECTIONS.items(), COLOURS, strict=False):
        sent = {number: total / MIB for number, total in records.bytes_per_round(direction).items()}
        bottoms = [below.get(number, 0.0) for number in sent]
        axes.bar(list(sent), list(sent.values()), bottom=bottoms, color=colour, width=0.8, label=label)
        below = {number: below.get(number, 0.0) + total for number, total in sent.items()}
    axes.set(title="Sent in each round", ylabel="MiB")
    legend_below(axes, columns=2)


def _draw_totals(axes: Axes, records: RunRecords) -> None:
    for (direction, label), colour in zip(_DIRECTIONS.items(), COLOURS, strict=False):
        sent = records.bytes_per_round(direction)
        totals = [total / MIB for total in accumulate(sent.values())]
        axes.plot(list(sent), totals, color=colour, label=label, marker="o" if len(totals) == 1 else "")
    axes.set(title=f"Sent so far (in all {records.total_bytes() / MIB:,.1f} MiB)", ylabel="MiB")
    legend_below(axes, columns=2)


def _draw_seconds(axes: Axes, records: RunRecords) -> None:
    seconds = records.seconds
    axes.bar(list(seconds), list(seconds.values()), color=COLOURS[2], width=0.8)
    axes.set(title=f"Time of each round (in all {sum(seconds.values()):,.0f} s)", ylabel="seconds")
