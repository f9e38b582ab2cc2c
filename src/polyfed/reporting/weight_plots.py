"""Aggregation weights: who counted how much, for which public samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from polyfed.reporting.figures import COLOURS, GREY, SEQUENTIAL, empty_figure, legend_beside, styled, whole_rounds
from polyfed.runs.arrays import ClientArray
from polyfed.runs.records import RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_COLUMNS = 400
_NAMED_CLIENTS = 30


@styled
def draw_weights(records: RunRecords, *, name: str, rounds: Mapping[int, ClientArray]) -> Figure:
    """The last round's weights, a heat map of clients by samples, and each client's mean by round."""
    last = max(rounds)
    array = rounds[last]
    figure = empty_figure(12, 2.2 + 0.26 * len(array.clients), title=f"{records.name}: {name}")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    _draw_map(left, array)
    left.set_title(f"round {last}")
    _draw_means(right, _means(records.clients, rounds), rounds)
    return figure


def _draw_map(axes: Axes, array: ClientArray) -> None:
    samples = array.values.shape[1]
    columns = binned(array.values, _MOST_COLUMNS)
    image = axes.imshow(
        columns,
        aspect="auto",
        interpolation="nearest",
        cmap=SEQUENTIAL,
        extent=(0, samples, len(columns) - 0.5, -0.5),
    )
    per_column = -(-samples // columns.shape[1])
    averaged = f", mean of {per_column} samples a column" if per_column > 1 else ""
    axes.figure.colorbar(image, ax=axes, label=f"weight{averaged}")
    axes.set_yticks(range(len(array.clients)), array.clients)
    axes.set_xlabel("public sample")
    axes.grid(visible=False)


def _means(clients: Sequence[str], rounds: Mapping[int, ClientArray]) -> dict[str, dict[int, float]]:
    """Client -> round -> mean weight over the samples, clients in the order of the run."""
    series: dict[str, dict[int, float]] = {client: {} for client in clients}
    for number, array in rounds.items():
        for client, mean in zip(array.clients, array.values.mean(axis=1), strict=True):
            series.setdefault(client, {})[number] = float(mean)
    return {client: means for client, means in series.items() if means}


def _draw_means(axes: Axes, series: Mapping[str, Mapping[int, float]], rounds: Mapping[int, ClientArray]) -> None:
    markers = "os^Dv<>P"
    for place, (client, means) in enumerate(series.items()):
        colour, marker = COLOURS[place % len(COLOURS)], markers[place // len(COLOURS) % len(markers)]
        axes.plot(list(means), list(means.values()), color=colour, marker=marker, markersize=4, label=client)
    uniform = {number: 1 / len(array.clients) for number, array in rounds.items()}
    axes.plot(list(uniform), list(uniform.values()), color=GREY, linestyle=":", label="equal weights")
    axes.set(title="mean over samples", xlabel="round", ylabel="mean weight")
    whole_rounds(axes)
    if len(series) <= _NAMED_CLIENTS:
        legend_beside(axes, columns=1 + len(series) // 16)


def binned(values: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """Columns averaged in runs of equal length (the last may be shorter); at most ``most`` are left."""
    width = -(-values.shape[1] // most)
    starts = np.arange(0, values.shape[1], max(1, width))
    lengths = np.diff([*starts, values.shape[1]])
    sums: NDArray[np.float64] = np.add.reduceat(values, starts, axis=1)
    return sums / lengths
