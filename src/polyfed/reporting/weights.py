"""Arrays by client and public sample that a run kept, such as aggregation weights: a map, and the means by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from polyfed.reporting.charts import FigureSheet, LegendEntry
from polyfed.reporting.curves import THIN_LINES, spread_chart
from polyfed.reporting.figures import COLOURS
from polyfed.reporting.round_charts import ChartLine, RoundChart
from polyfed.reporting.row_charts import HeatMap
from polyfed.runs.records import ClientArray, RunRecords

_MOST_COLUMNS = 200
_DASHES = ("solid", "dashed", "dotted")


def weight_sheets(records: RunRecords) -> dict[str, FigureSheet]:
    """Name of an array -> its values by client and sample in the last round, and each client's mean by round.

    Raises:
        RunError: a file is damaged.
    """
    # an array may name clients that the records do not: they come last, by name
    place = {client: number for number, client in enumerate(records.clients)}
    sheets = {}
    for name, stored in records.arrays().items():
        rounds = {number: array for number, array in sorted(stored.items()) if array.values.size}
        if rounds:
            present = {client for array in rounds.values() for client in array.clients}
            clients = sorted(present, key=lambda client: (place.get(client, len(place)), client))
            last = max(rounds)
            charts = [_map(f"{name}, round {last}", rounds[last], clients), _means(name, rounds, clients)]
            sheets[name] = FigureSheet(f"{records.name}: {name}", [charts])
    return sheets


def _map(title: str, array: ClientArray, order: Sequence[str]) -> HeatMap:
    """Samples are averaged in runs of equal length where they are many."""
    rows = [client for client in order if client in array.clients]
    samples = array.values.shape[1]
    width = -(-samples // _MOST_COLUMNS)
    starts = np.arange(0, samples, width)
    # the last run may be shorter, so sums are divided by true lengths
    means = np.add.reduceat(array.values, starts, axis=1) / np.diff([*starts, samples])
    columns = [f"{first} to {min(samples, first + width) - 1}" if width > 1 else f"{first}" for first in starts]
    note = f"Each column is the mean of {width} samples." if width > 1 else ""
    values = means[[array.clients.index(client) for client in rows]]
    return HeatMap(title, rows, values, "public sample", columns, note, scale="weight")


def _means(name: str, rounds: Mapping[int, ClientArray], clients: Sequence[str]) -> RoundChart:
    series: dict[str, dict[int, float]] = {client: {} for client in clients}
    for number, array in rounds.items():
        for client, mean in zip(array.clients, array.values.mean(axis=1), strict=True):
            series[client][number] = float(mean)
    equal = {number: 1 / len(array.clients) for number, array in rounds.items()}
    title, reference = f"Mean of {name} by client", ChartLine("equal weights", equal, 0, "dotted")
    if len(clients) > THIN_LINES:
        return spread_chart(title, "mean weight", series, 1, reference, carry=False)
    lines = [
        ChartLine(c, values, 1 + place % len(COLOURS), _DASHES[place // len(COLOURS) % len(_DASHES)])
        for place, (c, values) in enumerate(series.items())
    ]
    lines.append(reference)
    return RoundChart(title, "mean weight", lines, [LegendEntry(line.label, line.colour, line.dash) for line in lines])
