"""Arrays by client and public sample that a run kept, such as aggregation weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from polyfed.reporting.html.charts import COLOURS, Key, Line, line_chart
from polyfed.reporting.html.curves import THIN_LINES, heading, spread_chart
from polyfed.reporting.html.heat_map import NAMED_ROWS, Frame, HeatMap
from polyfed.reporting.html.markup import Markup, tag
from polyfed.runs.arrays import ClientArray
from polyfed.runs.records import RunRecords

_MOST_COLUMNS = 200
_LEAST_COLUMNS = 10
_MOST_CELLS = 500_000  # of all maps of the page: each takes about 2 bytes of it
_DASHES = ("solid", "dashed", "dotted")


def weights(records: RunRecords) -> Markup:
    """A map and the means by round for each kind of array; nothing if the run kept none.

    Raises:
        RunError: a file is damaged.
    """
    filled = {name: _filled(rounds) for name, rounds in records.arrays().items()}
    kept = {name: rounds for name, rounds in filled.items() if rounds}
    return Markup("".join(_array(records, name, rounds, _MOST_CELLS // len(kept)) for name, rounds in kept.items()))


def _filled(rounds: Mapping[int, ClientArray]) -> dict[int, ClientArray]:
    return {number: array for number, array in rounds.items() if array.values.size}


def _array(records: RunRecords, name: str, rounds: Mapping[int, ClientArray], most_cells: int) -> Markup:
    present = {client for array in rounds.values() for client in array.clients}
    order = {client: place for place, client in enumerate(records.clients)}
    clients = sorted(present, key=lambda client: (order.get(client, len(order)), client))
    charts = tag("div", _map(name, rounds, clients, most_cells), _means(name, rounds, clients), class_="pair")
    return tag("div", heading(name), charts, class_="block")


def _map(name: str, rounds: Mapping[int, ClientArray], clients: Sequence[str], most_cells: int) -> Markup:
    samples = max(array.values.shape[1] for array in rounds.values())
    tallest = _tallest(rounds, clients)
    width = -(-samples // max(_LEAST_COLUMNS, min(_MOST_COLUMNS, most_cells // tallest)))
    starts = range(0, samples, width)
    shown = _spaced(sorted(rounds), max(1, most_cells // (tallest * len(starts))))
    frames = {number: _frame(rounds[number], clients, width, len(starts)) for number in shown}
    columns = [f"{start}" if width == 1 else f"{start} to {min(samples, start + width) - 1}" for start in starts]
    notes = [f"Each column is the mean of {width} samples."] if width > 1 else []
    notes += [f"{len(shown)} of {len(rounds)} stored rounds are on this page."] if len(shown) < len(rounds) else []
    if any(np.isnan(frame.values).any() for frame in frames.values()):
        notes += ["Hatched: the client did not take part."]
    if len(clients) > NAMED_ROWS:
        notes += ["Rows are the clients that took part in the round."]
    return HeatMap(f"{name} by client and public sample", frames, "public sample", columns).drawn(" ".join(notes))


def _tallest(rounds: Mapping[int, ClientArray], clients: Sequence[str]) -> int:
    """Rows of the largest frame."""
    return len(clients) if len(clients) <= NAMED_ROWS else max(len(array.clients) for array in rounds.values())


def _frame(array: ClientArray, clients: Sequence[str], width: int, columns: int) -> Frame:
    """Rows of all clients, NaN for those that did not take part; of the cohort alone where there are many."""
    rows = clients if len(clients) <= NAMED_ROWS else _ordered(array.clients, clients)
    values = np.full((len(rows), columns), np.nan)
    starts = np.arange(0, array.values.shape[1], width)
    means = np.add.reduceat(array.values, starts, axis=1) / np.diff([*starts, array.values.shape[1]])
    place = {client: row for row, client in enumerate(rows)}
    for client, row in zip(array.clients, means, strict=True):
        values[place[client], : len(row)] = row
    return Frame(rows, values)


def _ordered(some: Sequence[str], clients: Sequence[str]) -> list[str]:
    present = set(some)
    return [client for client in clients if client in present]


def _spaced(rounds: Sequence[int], most: int) -> list[int]:
    """So many of the rounds, evenly spaced, the last among them."""
    kept = min(most, len(rounds))
    return [rounds[round((place + 1) * len(rounds) / kept) - 1] for place in range(kept)]


def _means(name: str, rounds: Mapping[int, ClientArray], clients: Sequence[str]) -> Markup:
    series: dict[str, dict[int, float]] = {client: {} for client in clients}
    for number, array in sorted(rounds.items()):
        for client, mean in zip(array.clients, array.values.mean(axis=1), strict=True):
            series[client][number] = float(mean)
    equal = {number: 1 / len(array.clients) for number, array in sorted(rounds.items())}
    title, line = f"Mean of {name} by client", Line("equal weights", equal, ("equal weights",), 0, "dotted")
    if len(clients) > THIN_LINES:
        return spread_chart(title, "mean weight", series, 1, [line], carry=False)
    lines = [
        Line(client, values, (client,), 1 + place % COLOURS, _DASHES[place // COLOURS % 3])
        for place, (client, values) in enumerate(series.items())
    ]
    keys = [Key(each.label, each.colour, each.dash) for each in (*lines, line)]
    return line_chart(title, "mean weight", [*lines, line], keys)
