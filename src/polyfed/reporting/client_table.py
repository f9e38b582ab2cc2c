"""One row a client: what it is, what it holds, how well it does, and what it sent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from polyfed.reporting.client_spread import main_metric
from polyfed.reporting.facts import client_kinds
from polyfed.reporting.incidents import rounds_of
from polyfed.reporting.tables import TextTable, format_number
from polyfed.reporting.traffic import byte_size, client_bytes
from polyfed.runs.events import Incident
from polyfed.runs.records import RunRecords

_Column = tuple[str, Sequence[str]]  # heading and cells, of which a dash says nothing


def clients_page_table(records: RunRecords) -> TextTable:
    """All clients; columns without any content are left out."""
    columns = [*_kinds(records), *_metrics(records), *_effort(records), *_exclusions(records)]
    filled = [(label, cells) for label, cells in columns if any(cell not in ("", "-") for cell in cells)]
    rows = list(zip(*(cells for _, cells in filled), strict=True))
    note = (
        "Metrics are those of each client's own last evaluation on its test samples, in the round it was measured in."
    )
    return TextTable("Clients", [label for label, _ in filled], rows, (note,))


def _kinds(records: RunRecords) -> Iterator[_Column]:
    names, kinds = records.clients, client_kinds(records)
    groups = {client: group for group, members in records.groups.items() for client in members}
    yield "client", names
    yield "group", [groups[name] for name in names]
    for label in ("task", "modalities", "architecture"):
        yield label, [kinds[name].get(label, "") for name in names]
    for label in ("items", "samples"):
        yield label, [_whole(getattr(records.holdings.get(name), label, None)) for name in names]


def _metrics(records: RunRecords) -> Iterator[_Column]:
    """The main metric of each group, and the loss."""
    mains = dict.fromkeys(main_metric(records, members) for members in records.groups.values())
    last = [records.last(client) for client in records.clients]
    # groups with different tasks have different metrics: each gets a column, with dashes for the others
    for metric in (*filter(None, mains), "loss"):
        yield metric, [format_number(metrics.get(metric, math.nan)) for metrics in last]
    measured = [max(records.series(client, main_metric(records, [client])), default=None) for client in records.clients]
    # clients are measured in the rounds they take part in, so figures side by side may be of different rounds
    if len(set(measured)) > 1:
        yield "measured in", [_whole(number) for number in measured]


def _effort(records: RunRecords) -> Iterator[_Column]:
    if not records.transfers:
        return
    rounds, sent = rounds_of(records), client_bytes(records)
    yield "rounds", [_whole(len(rounds.get(name, ()))) for name in records.clients]
    for direction in ("up", "down"):
        numbers = [sent.get(name, Counter())[direction] for name in records.clients]
        yield f"bytes {direction}", [byte_size(number) if number else "0" for number in numbers]


def _exclusions(records: RunRecords) -> Iterator[_Column]:
    excluded: dict[str, list[Incident]] = {client: [] for client in records.clients}
    for event in records.excluded():
        excluded.setdefault(event.participant, []).append(event)
    if not any(excluded.values()):
        return
    times = [excluded[name] for name in records.clients]
    yield "excluded", [_whole(len(events)) for events in times]
    yield "last reason", [f"round {events[-1].round}: {events[-1].reason}" if events else "" for events in times]


def _whole(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
