"""Bytes and time by round, and where the bytes went: by bundle, step and client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from polyfed.reporting.charts import LegendEntry
from polyfed.reporting.round_charts import RoundChart, stacked_chart
from polyfed.reporting.row_charts import BarPart, BarRows
from polyfed.reporting.tables import MIB, duration
from polyfed.runs.records import RunRecords, Transfer

BYTE_DIRECTIONS = {"down": "server to clients", "up": "clients to server"}
_MOST_ROWS = 30
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def sent_chart(records: RunRecords) -> RoundChart:
    title = f"Sent in each round (in all {records.total_bytes() / MIB:,.1f} MiB)"
    return stacked_chart(title, "MiB", {label: _mib(records, d) for d, label in BYTE_DIRECTIONS.items()})


def seconds_chart(records: RunRecords) -> RoundChart:
    title = f"Time of each round (in all {duration(sum(records.seconds.values()))})"
    return stacked_chart(title, "seconds", {"seconds": dict(sorted(records.seconds.items()))}, first_colour=3)


def bytes_bars(records: RunRecords) -> list[BarRows]:
    """MiB by bundle and step, the largest first, and by client in the order of the run; nothing of no bytes."""
    bundles = _totals(records, lambda transfer: f"{transfer.bundle} ({transfer.dtype or transfer.kind})")
    steps = _totals(records, lambda transfer: transfer.step or "(none)")
    parts = {"By bundle": _largest(bundles), "By step": _largest(steps)}
    title, clients = _by_client(records)
    return [_bars(name, totals) for name, totals in (parts | {title: clients}).items() if totals]


def _by_client(records: RunRecords) -> tuple[str, dict[str, Counter[str]]]:
    """Few clients in the order of the run, as everywhere in a report; of many only the largest matter."""
    clients = client_bytes(records)
    if len(clients) > _MOST_ROWS:
        return f"By client: the {_MOST_ROWS} with most bytes of {len(clients):,}", _largest(clients)
    return "By client", {client: clients[client] for client in records.clients if client in clients}


def client_bytes(records: RunRecords) -> dict[str, Counter[str]]:
    return _totals(records, lambda transfer: transfer.client)


def byte_size(number: float) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    power = 0
    while number >= 1024 and power < len(_UNITS) - 1:
        number, power = number / 1024, power + 1
    return f"{number:,.{min(power, 1)}f} {_UNITS[power]}"


def _mib(records: RunRecords, direction: str) -> dict[int, float]:
    return {number: total / MIB for number, total in records.bytes_per_round(direction).items()}


def _totals(records: RunRecords, key: Callable[[Transfer], str]) -> dict[str, Counter[str]]:
    totals: dict[str, Counter[str]] = {}
    for transfer in records.transfers:
        # counters add up directions that one of them lacks
        totals.setdefault(key(transfer), Counter())[transfer.direction] += transfer.bytes
    return totals


def _largest(totals: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
    return dict(sorted(totals.items(), key=lambda item: -item[1].total())[:_MOST_ROWS])


def _bars(title: str, totals: Mapping[str, Counter[str]]) -> BarRows:
    rows = {
        name: [
            BarPart(sent[direction] / MIB, f"{label}: {byte_size(sent[direction])}", colour)
            for colour, (direction, label) in enumerate(BYTE_DIRECTIONS.items(), start=1)
        ]
        for name, sent in totals.items()
    }
    legend = [LegendEntry(label, colour, "area") for colour, label in enumerate(BYTE_DIRECTIONS.values(), start=1)]
    return BarRows(title, rows, {name: byte_size(sent.total()) for name, sent in totals.items()}, "MiB", legend)
