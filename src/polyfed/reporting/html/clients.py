"""One row a client: what it is, what it holds, how well it does, and what it sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from polyfed.reporting.curves import group_colour, main_metric
from polyfed.reporting.html.events import rounds_of
from polyfed.reporting.html.facts import client_kinds
from polyfed.reporting.html.page_tables import PageTable, TableCell, TableColumn, count_cell, number_cell
from polyfed.reporting.traffic import byte_size, client_bytes
from polyfed.runs.events import Incident
from polyfed.runs.records import RunRecords

_ColumnCells = tuple[TableColumn, Sequence[TableCell]]


def clients_page_table(records: RunRecords) -> PageTable | None:
    """The sortable table of all clients, None if there are none; columns without any content are left out."""
    if not records.clients:
        return None
    columns = [*_kinds(records), *_metrics(records), *_effort(records), *_exclusions(records)]
    # a cell is false if it says nothing: an empty text or a dash
    filled = [(column, cells) for column, cells in columns if any(cells)]
    rows = list(zip(*(cells for _, cells in filled), strict=True))
    caption = "Clients. Metrics are those of each client's own last evaluation on its test samples."
    return PageTable(caption, [column for column, _ in filled], rows, "clients-table", sortable=True)


def _kinds(records: RunRecords) -> Iterator[_ColumnCells]:
    names, kinds = records.clients, client_kinds(records)
    groups: dict[str, TableCell] = {}
    for group, members in records.groups.items():
        groups |= dict.fromkeys(members, TableCell(group, dot=group_colour(records, group)))
    yield TableColumn("client", numeric=False), [TableCell(name) for name in names]
    yield TableColumn("group", numeric=False), [groups[name] for name in names]
    for label in ("task", "modalities", "architecture"):
        yield TableColumn(label, numeric=False), [TableCell(kinds[name].get(label, "")) for name in names]
    for label in ("items", "samples"):
        held = [getattr(records.holdings.get(name), label, None) for name in names]
        yield TableColumn(label), [count_cell(number) for number in held]


def _metrics(records: RunRecords) -> Iterator[_ColumnCells]:
    """The main metric of each group, and the loss."""
    mains = dict.fromkeys(main_metric(records, members) for members in records.groups.values())
    last = [records.last(client) for client in records.clients]
    # groups with different tasks have different metrics: each gets a column, with dashes for the others
    for metric in (*filter(None, mains), "loss"):
        yield TableColumn(metric), [number_cell(metrics.get(metric)) for metrics in last]
    measured = [max(records.series(client, main_metric(records, [client])), default=None) for client in records.clients]
    # clients are measured in the rounds they take part in, so figures side by side may be of different rounds
    if len(set(measured)) > 1:
        column = TableColumn("measured in", hint="round of its last evaluation")
        yield column, [count_cell(number) for number in measured]


def _effort(records: RunRecords) -> Iterator[_ColumnCells]:
    if not records.transfers:
        return
    rounds, sent = rounds_of(records), client_bytes(records)
    column = TableColumn("rounds", hint="rounds in which it answered")
    yield column, [count_cell(len(rounds.get(name, ()))) for name in records.clients]
    for direction in ("up", "down"):
        numbers = [sent.get(name, Counter())[direction] for name in records.clients]
        cells = [TableCell(byte_size(number) if number else "0", number) for number in numbers]
        yield TableColumn(f"bytes {direction}"), cells


def _exclusions(records: RunRecords) -> Iterator[_ColumnCells]:
    excluded: dict[str, list[Incident]] = {client: [] for client in records.clients}
    for event in records.excluded():
        excluded.setdefault(event.participant, []).append(event)
    if not any(excluded.values()):
        return
    times = [excluded[name] for name in records.clients]
    yield TableColumn("excluded", hint="times it was left out"), [count_cell(len(events)) for events in times]
    reasons = [f"round {events[-1].round}: {events[-1].reason}" if events else "" for events in times]
    yield TableColumn("last reason", numeric=False), [TableCell(reason) for reason in reasons]
