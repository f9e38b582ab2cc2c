"""What each client holds: bubbles of clients by classes, and bars of sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from polyfed.reporting.figures import COLOURS, empty_figure, styled
from polyfed.reporting.records import Holding, RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED_CLASSES = 30  # up to here class names fit below the axis


@styled
def draw_partition(records: RunRecords) -> Figure | None:
    """One row a group: samples by client and class as bubbles (where labelled), and sizes as bars."""
    groups: dict[str, dict[str, Holding]] = {}
    for client, holding in records.holdings.items():
        groups.setdefault(holding.group, {})[client] = holding
    if not groups:
        return None
    heights = [1.6 + 0.24 * len(clients) for clients in groups.values()]
    figure = empty_figure(11, sum(heights) + 0.4, title=f"{records.name}: partition")
    rows = figure.subfigures(len(groups), 1, height_ratios=heights, squeeze=False)[:, 0]
    for number, (row, (group, clients)) in enumerate(zip(rows, groups.items(), strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        if any(holding.labels for holding in clients.values()):
            bubbles, bars = row.subplots(1, 2, width_ratios=(3, 1), sharey=True)
            _draw_bubbles(bubbles, clients, colour)
            bubbles.set_title(f"{group}: samples by class ({_sources(clients)})")
            bars.set_title("sizes")
        else:
            bars = row.subplots(1, 1)
            bars.set_title(f"{group}: sizes, no labels ({_sources(clients)})")
        _draw_sizes(bars, clients, colour)
    return figure


def _draw_bubbles(axes: Axes, clients: Mapping[str, Holding], colour: str) -> None:
    counts = [holding.labels or {} for holding in clients.values()]
    names = sorted({name for labels in counts for name in labels}, key=_natural)
    found = [
        (names.index(name), place, number)
        for place, labels in enumerate(counts)
        for name, number in labels.items()
        if number
    ]
    x, y, sizes = zip(*found, strict=True) if found else ((), (), ())
    largest = max(sizes, default=1)
    # diameters in points: the largest bubble just fills its cell
    diameter = min(15.0, 500.0 / max(1, len(names)))
    areas = [max(0.6, diameter**2 * size / largest) for size in sizes]
    axes.scatter(x, y, s=areas, color=colour, alpha=0.85, linewidth=0)
    axes.set(
        xlim=(-0.7, len(names) - 0.3),
        xlabel=f"class (largest bubble: {largest:,} samples, area is proportional)",
    )
    if len(names) <= _NAMED_CLASSES:
        slanted = max(map(len, names), default=0) * len(names) > 90
        axes.set_xticks(range(len(names)), names, rotation=40 if slanted else 0, ha="right" if slanted else "center")


def _draw_sizes(axes: Axes, clients: Mapping[str, Holding], colour: str) -> None:
    places = range(len(clients))
    samples = [holding.samples for holding in clients.values()]
    items = [holding.items for holding in clients.values()]
    axes.barh(places, samples, color=colour, height=0.7, label="samples")
    if items != samples:
        axes.barh(places, items, color="#222222", height=0.25, label="items")
        axes.legend(loc="lower right")
    axes.set_yticks(places, list(clients))
    axes.set(ylim=(len(clients) - 0.4, -0.6), xlabel="samples")
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key that puts ``class 10`` after ``class 9``."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


def _sources(clients: Mapping[str, Holding]) -> str:
    return ", ".join(dict.fromkeys(f"{holding.source} {holding.split}" for holding in clients.values()))
