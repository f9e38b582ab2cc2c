"""Arrays by client and public sample that a run kept, such as aggregation weights: a map, and the means by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

import numpy as np

from polyfed.reporting.charts import ChartLine, HeatMap, HeatMapFrame, LegendEntry, RoundChart
from polyfed.reporting.curves import THIN_LINES, spread_chart
from polyfed.reporting.figures import COLOURS
from polyfed.runs.arrays import ClientArray
from polyfed.runs.records import RunRecords

NAMED_ROWS = 40
"""Up to so many rows of a map have their names beside them, and are the same in every round."""

_MOST_COLUMNS = 200
_LEAST_COLUMNS = 10
_MOST_CELLS = 500_000  # of all maps of a page: each takes about 2 bytes of it
_DASHES = ("solid", "dashed", "dotted")


def weight_charts(records: RunRecords) -> dict[str, tuple[HeatMap, RoundChart]]:
    """Name of an array -> its values by client and sample, and each client's mean by round.

    Raises:
        RunError: a file is damaged.
    """
    arrays = {
        name: {number: array for number, array in sorted(rounds.items()) if array.values.size}
        for name, rounds in records.arrays().items()
    }
    kept = {name: rounds for name, rounds in arrays.items() if rounds}
    # an array may name clients that the records do not: they come last, by name
    place = {client: number for number, client in enumerate(records.clients)}
    charts = {}
    for name, rounds in kept.items():
        present = {client for array in rounds.values() for client in array.clients}
        clients = sorted(present, key=lambda client: (place.get(client, len(place)), client))
        charts[name] = _map(name, rounds, clients, _MOST_CELLS // len(kept)), _means(name, rounds, clients)
    return charts


def _map(name: str, rounds: Mapping[int, ClientArray], clients: Sequence[str], most_cells: int) -> HeatMap:
    """Samples are averaged in runs of equal length, and rounds left out, as far as the number of cells demands it."""
    named = len(clients) <= NAMED_ROWS
    samples = max(array.values.shape[1] for array in rounds.values())
    tallest = len(clients) if named else max(len(array.clients) for array in rounds.values())
    # each cell takes its share of the page: first columns are merged, then rounds are left out
    width = -(-samples // max(_LEAST_COLUMNS, min(_MOST_COLUMNS, most_cells // tallest)))
    starts = range(0, samples, width)
    kept = _evenly(list(rounds), max(1, most_cells // (tallest * len(starts))))
    frames = {number: _frame(rounds[number], clients, width, len(starts), named=named) for number in kept}
    columns = [f"{start}" if width == 1 else f"{start} to {min(samples, start + width) - 1}" for start in starts]
    notes = {
        f"Each column is the mean of {width} samples.": width > 1,
        f"{len(kept)} of {len(rounds)} stored rounds are on this page.": len(kept) < len(rounds),
        "Hatched: the client did not take part.": any(np.isnan(frame.values).any() for frame in frames.values()),
        "Rows are the clients that took part in the round.": not named,
    }
    note = " ".join(compress(notes, notes.values()))
    return HeatMap(f"{name} by client and public sample", frames, "public sample", columns, note)


def _evenly(rounds: Sequence[int], most: int) -> list[int]:
    kept = min(most, len(rounds))
    return [rounds[round((place + 1) * len(rounds) / kept) - 1] for place in range(kept)]


def _frame(array: ClientArray, clients: Sequence[str], width: int, columns: int, *, named: bool) -> HeatMapFrame:
    """Rows of all clients, NaN for those that did not take part; of the cohort alone where there are many."""
    present = dict(zip(array.clients, range(len(array.clients)), strict=True))
    # with few clients rows stay in place when the slider moves; with many only the cohort fits
    rows = clients if named else [client for client in clients if client in present]
    starts = np.arange(0, array.values.shape[1], width)
    # the last run of columns may be shorter, so sums are divided by true lengths
    means = np.add.reduceat(array.values, starts, axis=1) / np.diff([*starts, array.values.shape[1]])
    values = np.full((len(rows), columns), np.nan)
    for number, client in enumerate(rows):
        if client in present:
            values[number, : len(starts)] = means[present[client]]
    return HeatMapFrame(rows, values)


def _means(name: str, rounds: Mapping[int, ClientArray], clients: Sequence[str]) -> RoundChart:
    series: dict[str, dict[int, float]] = {client: {} for client in clients}
    for number, array in rounds.items():
        for client, mean in zip(array.clients, array.values.mean(axis=1), strict=True):
            series[client][number] = float(mean)
    equal = {number: 1 / len(array.clients) for number, array in rounds.items()}
    title, reference = f"Mean of {name} by client", ChartLine("equal weights", equal, ("equal weights",), 0, "dotted")
    if len(clients) > THIN_LINES:
        return spread_chart(title, "mean weight", series, 1, reference, carry=False)
    lines = [
        ChartLine(c, values, (c,), 1 + place % len(COLOURS), _DASHES[place // len(COLOURS) % len(_DASHES)])
        for place, (c, values) in enumerate(series.items())
    ]
    lines.append(reference)
    return RoundChart(title, "mean weight", lines, [LegendEntry(line.label, line.colour, line.dash) for line in lines])
