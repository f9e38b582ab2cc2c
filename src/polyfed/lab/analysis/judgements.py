"""Figures of models at clients: how the analyses of simulated runs read, show and draw them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from polyfed.lab.analysis.drawing import DIVERGING, heat_map
from polyfed.reporting.figures import empty_figure
from polyfed.reporting.recalls import find_recalls
from polyfed.reporting.tables import TextTable, count, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Figures = Mapping[str, Mapping[str, float]]
"""Client -> figure (``R@1``) -> value."""

SHOWN_FIGURES = 2
"""Figures that tables and plots show, such as R@1 and R@5; the files have all."""


def figures_of(metrics: Mapping[str, float], primary: str) -> dict[str, float]:
    """``R@K``, mean over directions, for each protocol and K, then galleries; without recalls the main metric.

    Protocols are told apart as in the metrics: ``R@1``, ``R@1_full``, ``R@1_batch64``; ``gallery`` likewise.
    """
    recalls: dict[str, list[float]] = {}
    galleries: dict[str, list[float]] = {}
    for recall in sorted(find_recalls(metrics), key=lambda recall: (recall.protocol, recall.cutoff)):
        suffix = f"_{recall.protocol}" if recall.protocol else ""
        recalls.setdefault(f"R@{recall.cutoff}{suffix}", []).append(recall.value)
        if not math.isnan(recall.gallery):
            galleries.setdefault(f"gallery{suffix}", []).append(recall.gallery)
    means = {name: fmean(values) for name, values in (recalls | galleries).items()}
    return means or {primary: metrics[primary]}


def names_of(figures: Figures) -> list[str]:
    return list(next(iter(figures.values())))


def with_mean(figures: Figures, name: str) -> list[float]:
    """One figure at every client, and their mean."""
    values = [at_client[name] for at_client in figures.values()]
    return [*values, fmean(values)]


def mean_figures(several: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """The mean over several models, client by client."""
    return {
        client: {name: fmean(figures[client][name] for figures in several) for name in at_client}
        for client, at_client in several[0].items()
    }


def cells(figures: Figures, name: str) -> list[str]:
    return [figure(value) for value in with_mean(figures, name)]


def client_table(
    run: str, name: str, figures: Figures, rows: Sequence[Sequence[str]], notes: Sequence[str], *more: str
) -> TextTable:
    """A row a model, a column a client; under it how large the galleries are that a recall is of."""
    key = f"gallery{''.join(name.partition('_')[1:])}"
    sizes = ", ".join(f"{client} {count(at[key])}" for client, at in figures.items() if key in at)
    galleries = [f"Gallery, mean over directions: {sizes}."] if sizes and name.startswith("R@") else []
    columns = ("model", *figures, "average", *more)
    return TextTable(f"{run}: {name} at each client", columns, rows, (*notes, *galleries))


def heat_maps(rows: Sequence[int], panels: int, columns: int, title: str) -> tuple[Figure, list[list[Axes]]]:
    """A figure with panels for heat maps side by side, lines of which have so many rows each."""
    width, height = 2.8 + max(2.4, 0.55 * min(columns, 30)), 1.6 + max(1.6, 0.35 * min(max(rows), 60))
    drawing = empty_figure(width * panels, height * len(rows), title)
    return drawing, [list(line) for line in drawing.subplots(len(rows), panels, squeeze=False)]


def map_of_changes(axes: Axes, changes: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str]) -> None:
    heat_map(axes, changes, rows, columns, colours=DIVERGING, digits=1)
