"""One row a client: what it is, what it holds, how well it does, and what it sent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from polyfed.reporting.html.cells import Cell, Column, data_table, number_cell, size_cell
from polyfed.reporting.html.curves import group_colour, main_metric
from polyfed.reporting.html.events import rounds_of
from polyfed.reporting.html.facts import ClientKind, client_kinds
from polyfed.reporting.html.markup import Child, Markup, tag
from polyfed.reporting.html.traffic import client_bytes
from polyfed.runs.records import EventRecord, RunRecords

Row = list[Cell | Child]


@dataclass(frozen=True)
class _Known:
    """What is known of the clients, by client id."""

    kinds: Mapping[str, ClientKind]
    group_of: Mapping[str, str]
    rounds: Mapping[str, list[int]]
    sent: Mapping[str, Counter[str]]
    excluded: Mapping[str, list[EventRecord]] = field(default_factory=dict)


def clients(records: RunRecords) -> Markup:
    """The sortable table of all clients; nothing if there are none. Columns without any content are left out."""
    if not records.clients:
        return Markup()
    columns = list(_columns(records, _known(records)))
    shown = [(column, cells) for column, cells in columns if any(_content(cell) for cell in cells)]
    rows = [list(cells) for cells in zip(*(cells for _, cells in shown), strict=True)]
    search = tag("input", type="search", data_search="clients-table", placeholder="image-0, retrieval …")
    bar = tag("label", "find ", search, tag("output", f"{len(rows):,} clients"), class_="filter scripted")
    caption = "Clients. Metrics are those of each client's own last evaluation on its test samples."
    table = data_table([column for column, _ in shown], rows, caption=caption, id_="clients-table", sortable=True)
    return Markup((bar if len(rows) > 1 else "") + table)


def _known(records: RunRecords) -> _Known:
    excluded: dict[str, list[EventRecord]] = {}
    for event in records.excluded():
        excluded.setdefault(event.participant, []).append(event)
    group_of = {client: group for group, members in records.groups.items() for client in members}
    return _Known(client_kinds(records), group_of, rounds_of(records), client_bytes(records), excluded)


def _columns(records: RunRecords, known: _Known) -> Iterator[tuple[Column, Row]]:
    """Each column with its cells in client order."""
    names = records.clients
    yield Column("client", numeric=False), list(names)
    yield Column("group", numeric=False), [_group(records, known.group_of[name]) for name in names]
    for label in ("task", "modalities", "architecture"):
        yield Column(label, numeric=False), [getattr(known.kinds[name], label) for name in names]
    held = [records.holdings.get(name) for name in names]
    yield Column("items"), [_count(holding.items if holding else None) for holding in held]
    yield Column("samples"), [_count(holding.samples if holding else None) for holding in held]
    yield from _metrics(records)
    if records.transfers:
        yield from _effort(names, known)
    if known.excluded:
        times = [known.excluded.get(name, []) for name in names]
        yield Column("excluded", hint="times it was left out"), [_count(len(found)) for found in times]
        yield Column("last reason", numeric=False), [_reason(found) for found in times]


def _effort(names: Sequence[str], known: _Known) -> Iterator[tuple[Column, Row]]:
    yield Column("rounds", hint="rounds in which it answered"), [_count(len(known.rounds.get(n, ()))) for n in names]
    for direction in ("up", "down"):
        sent = [known.sent.get(name, Counter())[direction] for name in names]
        yield Column(f"bytes {direction}"), [size_cell(number) for number in sent]


def _metrics(records: RunRecords) -> Iterator[tuple[Column, Row]]:
    """The main metric of each group, and the loss."""
    mains = dict.fromkeys(main_metric(records, members) for members in records.groups.values())
    last = [records.last(client) for client in records.clients]
    for metric in (*(name for name in mains if name), "loss"):
        yield Column(metric), [number_cell(metrics.get(metric)) for metrics in last]
    measured = [max(records.series(client, main_metric(records, [client])), default=None) for client in records.clients]
    if len(set(measured)) > 1:
        yield Column("measured in", hint="round of its last evaluation"), [_count(number) for number in measured]


def _content(cell: Cell | Child) -> bool:
    """Whether a cell says anything: a dash and an empty text do not."""
    if isinstance(cell, Cell):
        return cell.number is not None and not math.isnan(cell.number)
    return bool(cell)


def _group(records: RunRecords, group: str) -> Markup:
    dot = tag("span", class_=f"dot c{group_colour(records, group)}", aria_hidden="true")
    return Markup(dot + tag("span", group))


def _count(number: int | None) -> Cell:
    return number_cell(None) if number is None else Cell(f"{number:,}", number)


def _reason(events: list[EventRecord]) -> str:
    return f"round {events[-1].round}: {events[-1].reason}" if events else ""
