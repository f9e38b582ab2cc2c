"""Arrays by client and public sample that a run kept, such as aggregation weights: maps, and the means by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np
from jaxtyping import Float

from polyfed.reporting.charts import FigureSheet, LegendEntry
from polyfed.reporting.curves import THIN_LINES, spread_chart
from polyfed.reporting.figures import COLOURS
from polyfed.reporting.round_charts import ChartLine, RoundChart
from polyfed.reporting.row_charts import HeatMap, limits_of
from polyfed.runs.arrays import ClientArray
from polyfed.runs.records import RunRecords

_NAMED_ROWS = 40  # up to so many clients have a row in every round
_MOST_COLUMNS = 200
_MOST_ROUNDS = 6  # of those that were stored, evenly spaced, the last among them; half of it for many clients
_DASHES = ("solid", "dashed", "dotted")


def weight_sheets(records: RunRecords) -> dict[str, FigureSheet]:
    """Name of an array -> its values by client and sample in some rounds, and each client's mean by round.

    Raises:
        RunError: a file is damaged.
    """
    arrays = {
        name: {number: array for number, array in sorted(rounds.items()) if array.values.size}
        for name, rounds in records.arrays().items()
    }
    # an array may name clients that the records do not: they come last, by name
    place = {client: number for number, client in enumerate(records.clients)}
    sheets = {}
    for name, rounds in arrays.items():
        if rounds:
            present = {client for array in rounds.values() for client in array.clients}
            clients = sorted(present, key=lambda client: (place.get(client, len(place)), client))
            charts = [*_maps(name, rounds, clients), _means(name, rounds, clients)]
            sheets[name] = FigureSheet(f"{records.name}: {name}", [charts[k : k + 3] for k in range(0, len(charts), 3)])
    return sheets


def _maps(name: str, rounds: Mapping[int, ClientArray], clients: Sequence[str]) -> list[HeatMap]:
    """Small multiples on one scale; samples are averaged in runs of equal length where they are many."""
    named = len(clients) <= _NAMED_ROWS
    kept = min(_MOST_ROUNDS if named else _MOST_ROUNDS // 2, len(rounds))
    shown = _evenly(list(rounds), kept)
    samples = max(array.values.shape[1] for array in rounds.values())
    width = -(-samples // _MOST_COLUMNS)
    columns = [_column(start, min(samples, start + width) - 1) for start in range(0, samples, width)]
    rows = {n: clients if named else _cohort(rounds[n], clients) for n in shown}
    values = {n: _column_means(rounds[n], rows[n], width, len(columns)) for n in shown}
    every = np.concatenate([grid.ravel() for grid in values.values()])
    notes = {
        f"Each column is the mean of {width} samples.": width > 1,
        f"{kept} of {len(rounds)} stored rounds are shown.": kept < len(rounds),
        "Hatched: the client did not take part.": bool(np.isnan(every).any()),
        "Rows are the clients that took part in the round.": not named,
    }
    scale = limits_of(every)
    maps = [HeatMap(f"{name}, round {n}", rows[n], values[n], "public sample", columns, "", scale) for n in shown]
    maps[0] = replace(maps[0], note=" ".join(compress(notes, notes.values())))
    maps[-1] = replace(maps[-1], scale=name)
    return maps


def _evenly(rounds: Sequence[int], kept: int) -> list[int]:
    return [rounds[round((place + 1) * len(rounds) / kept) - 1] for place in range(kept)]


def _cohort(array: ClientArray, clients: Sequence[str]) -> list[str]:
    # with few clients rows stay in place from map to map; with many only the cohort fits
    return [client for client in clients if client in array.clients]


def _column(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"


def _column_means(
    array: ClientArray, rows: Sequence[str], width: int, columns: int
) -> Float[np.ndarray, "rows columns"]:
    """NaN for clients that did not take part."""
    present = dict(zip(array.clients, range(len(array.clients)), strict=True))
    starts = np.arange(0, array.values.shape[1], width)
    # the last run of columns may be shorter, so sums are divided by true lengths
    means = np.add.reduceat(array.values, starts, axis=1) / np.diff([*starts, array.values.shape[1]])
    values = np.full((len(rows), columns), np.nan)
    for number, client in enumerate(rows):
        if client in present:
            values[number, : len(starts)] = means[present[client]]
    return values


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
