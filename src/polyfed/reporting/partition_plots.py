"""What each client holds: bubbles of clients by classes, a map of clients by columns, and bars of sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from polyfed.reporting.figures import COLOURS, SEQUENTIAL, empty_figure, legend_below, styled
from polyfed.reporting.partition_tables import classes_of, features, groups_of, short_names, sources_of
from polyfed.runs.records import Holding, RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED_CLASSES = 30  # up to here class names fit below the axis
_LONGEST_NAME = 30  # letters; classes with longer names are numbered, in the order of the table
_WRITTEN_CELLS = 80  # up to here counts fit into the map


@styled
def draw_partition(records: RunRecords) -> Figure | None:
    """One row a group: samples by client and class as bubbles (where labelled), and sizes as bars.

    Where the class is made of columns, shares of each client's items by column stand between them.
    """
    groups = groups_of(records.holdings)
    if not groups:
        return None
    heights = [_height(clients) for clients in groups.values()]
    figure = empty_figure(11, sum(heights) + 0.4, title=f"{records.name}: partition")
    rows = figure.subfigures(len(groups), 1, height_ratios=heights, squeeze=False)[:, 0]
    for number, (row, (group, clients)) in enumerate(zip(rows, groups.items(), strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        if any(holding.labels for holding in clients.values()):
            by_column = any(features(clients).values())
            ratios = (3, 1.4, 1) if by_column else (3, 1)
            bubbles, *between, bars = row.subplots(1, len(ratios), width_ratios=ratios, sharey=True)
            _draw_bubbles(bubbles, clients, colour)
            for axes in between:
                _draw_columns(axes, clients)
            bubbles.set_title(f"{group}: samples by class ({_sources(clients)})")
            bars.set_title("sizes")
        else:
            bars = row.subplots(1, 1)
            bars.set_title(f"{group}: sizes, no labels ({_sources(clients)})")
        _draw_sizes(bars, clients, colour)
    return figure


def _draw_bubbles(axes: Axes, clients: Mapping[str, Holding], colour: str) -> None:
    counts = [holding.labels or {} for holding in clients.values()]
    names = classes_of(clients)
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
    shown = _names_below(names, clients)
    if shown:
        slanted = max(map(len, shown), default=0) * len(shown) > 90
        axes.set_xticks(range(len(names)), shown, rotation=40 if slanted else 0, ha="right" if slanted else "center")


def _draw_columns(axes: Axes, clients: Mapping[str, Holding]) -> None:
    """Per cent of each client's items, coloured on one scale from 0 to 100, with the counts where they fit."""
    counts = list(features(clients).values())
    names = list(counts[0])
    items = [max(1, holding.items) for holding in clients.values()]
    shares = [[100 * row[name] / total for name in names] for row, total in zip(counts, items, strict=True)]
    axes.imshow(shares, aspect="auto", cmap=SEQUENTIAL, vmin=0, vmax=100)
    if len(names) * len(clients) <= _WRITTEN_CELLS:
        for place, row in enumerate(counts):
            for k, name in enumerate(names):
                colour = "black" if shares[place][k] > 60 else "white"
                axes.text(k, place, f"{row[name]:,}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(names)), short_names(names, clients), rotation=40, ha="right")
    axes.set_title("by column (0 to 100 %)")
    axes.grid(visible=False)


def _names_below(names: Sequence[str], clients: Mapping[str, Holding]) -> list[str]:
    """Names of classes as they stand below the axis; none where there is no room for them."""
    shown = short_names(names, clients)
    fit = len(shown) <= _NAMED_CLASSES and max(map(len, shown), default=0) <= _LONGEST_NAME
    return shown if fit else []


def _height(clients: Mapping[str, Holding]) -> float:
    """Inches: long names of classes and columns stand slanted below."""
    named = short_names(list(next(iter(features(clients).values()))), clients)
    longest = max(map(len, [*named, *_names_below(classes_of(clients), clients)]), default=0)
    return 1.6 + 0.24 * len(clients) + 0.055 * max(0, longest - 8)


def _draw_sizes(axes: Axes, clients: Mapping[str, Holding], colour: str) -> None:
    places = range(len(clients))
    samples = [holding.samples for holding in clients.values()]
    items = [holding.items for holding in clients.values()]
    also = [int(holding.also["samples"]) if holding.also else 0 for holding in clients.values()]
    own = [total - more for total, more in zip(samples, also, strict=True)]
    axes.barh(places, own, color=colour, height=0.7, label="samples")
    if any(also):
        axes.barh(places, also, left=own, color=colour, alpha=0.45, height=0.7, label="samples in addition")
    if items != samples:
        axes.barh(places, items, color="#222222", height=0.25, label="items")
    if items != samples or any(also):
        legend_below(axes, columns=1 + any(also))
    axes.set_yticks(places, list(clients))
    axes.set(ylim=(len(clients) - 0.4, -0.6), xlabel="samples")
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def _sources(clients: Mapping[str, Holding]) -> str:
    return ", ".join(sources_of(clients))
