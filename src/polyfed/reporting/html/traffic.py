"""Bytes and time: by round, by kind of bundle, by step and by client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from polyfed.reporting.html.bars import Segment, bar_table
from polyfed.reporting.html.cells import size
from polyfed.reporting.html.charts import Line, grid, stacked_chart
from polyfed.reporting.html.curves import heading
from polyfed.reporting.html.markup import Markup, tag
from polyfed.reporting.tables import MIB, duration
from polyfed.runs.records import RunRecords, Transfer

DIRECTIONS = {"down": "server to clients", "up": "clients to server"}
_MOST_CLIENTS = 30


def traffic(records: RunRecords) -> Markup:
    """Charts of bytes and seconds; nothing if neither was recorded."""
    charts = grid(_by_round(records), _seconds(records))
    tables = _tables(records) if records.transfers else ""
    return Markup(charts + tables)


def client_bytes(records: RunRecords) -> dict[str, Counter[str]]:
    """Client id -> direction -> bytes."""
    return _totals(records, lambda transfer: transfer.client)


def _by_round(records: RunRecords) -> Markup:
    sent = [
        Line(label, {n: b / MIB for n, b in records.bytes_per_round(direction).items()}, (label,), place)
        for place, (direction, label) in enumerate(DIRECTIONS.items(), start=1)
    ]
    return stacked_chart("Sent in each round", "MiB", sent)


def _seconds(records: RunRecords) -> Markup:
    total = duration(sum(records.seconds.values()))
    times = dict(sorted(records.seconds.items()))
    return stacked_chart(f"Time of each round (in all {total})", "seconds", [Line("seconds", times, (), 3)])


def _tables(records: RunRecords) -> Markup:
    kinds = _totals(records, lambda transfer: _named(transfer.kind))
    bundles = _totals(records, lambda transfer: f"{transfer.bundle} ({transfer.dtype or transfer.kind})")
    steps = _totals(records, lambda transfer: _named(transfer.step))
    clients = client_bytes(records)
    shown = dict(sorted(clients.items(), key=lambda item: -item[1].total())[:_MOST_CLIENTS])
    if len(clients) <= _MOST_CLIENTS:
        shown = {client: clients[client] for client in records.clients if client in clients}
        caption = "By client"
    else:
        caption = f"By client: the {_MOST_CLIENTS} with most bytes of {len(clients):,}"
    parts = [
        _bars("By kind of bundle", _largest_first(kinds), "kind"),
        _bars("By bundle", _largest_first(bundles), "bundle") if len(bundles) > len(kinds) else None,
        _bars("By step", _largest_first(steps), "step"),
    ]
    columns = [tag("div", parts), _bars(caption, shown, "client")]
    legend = [
        tag("span", tag("span", class_=f"part c{place}"), label) for place, label in enumerate(DIRECTIONS.values(), 1)
    ]
    swatches, tables = tag("div", legend, class_="swatches"), tag("div", columns, class_="columns")
    return tag("div", heading("Where the bytes went"), swatches, tables, class_="block apart")


def _bars(caption: str, totals: Mapping[str, Counter[str]], heading: str) -> Markup:
    rows = {
        name: [
            Segment(counts[direction], f"{label}: {size(counts[direction])}", place)
            for place, (direction, label) in enumerate(DIRECTIONS.items(), start=1)
        ]
        for name, counts in totals.items()
    }
    figures = {name: size(counts.total()) for name, counts in totals.items()}
    return bar_table(caption, rows, figures, heading)


def _totals(records: RunRecords, key: Callable[[Transfer], str]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for transfer in records.transfers:
        found.setdefault(key(transfer), Counter())[transfer.direction] += transfer.bytes
    return found


def _largest_first(totals: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
    return dict(sorted(totals.items(), key=lambda item: -item[1].total())[:_MOST_CLIENTS])


def _named(text: str) -> str:
    return text or "(none)"
