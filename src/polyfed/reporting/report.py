"""The report that ends a run: for the terminal, as ``report.md``, and about clients as ``client_spread.json``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from polyfed.core.files import write_atomically
from polyfed.core.untrusted import markdown, plain
from polyfed.reporting.client_spread import ClientSpread, client_spread, quality_names, spread_over, spreads_json
from polyfed.reporting.recalls import Recall, find_recalls, is_context
from polyfed.reporting.tables import TextTable, count, duration, figure, mib
from polyfed.runs.records import SERVER, SITE_REFUSED, EventRecord, RunRecords

if TYPE_CHECKING:
    from rich.console import RenderableType

_KINDS = ("test", "validation")


def report(records: RunRecords) -> RenderableType:
    """The whole report as something that a rich console prints."""
    from rich.console import Group
    from rich.text import Text

    title = Text(plain(_title(records)), style="bold underline")
    warnings = [Text(plain(f"warning: {warning}"), style="yellow") for warning in records.warnings]
    return Group(title, *warnings, Text(), *(table.rich() for table in tables(records)), Text(plain(_where(records))))


def write_report(records: RunRecords) -> Path:
    """Write ``report.md``, and ``client_spread.json`` if clients were measured; returns the former."""
    warnings = [f"**Warning**: {markdown(warning)}.\n" for warning in records.warnings]
    parts = [
        f"# {markdown(_title(records))}\n",
        *warnings,
        *(table.markdown() for table in tables(records)),
        markdown(_where(records)),
    ]
    path = records.folder / "report.md"
    write_atomically(path, ("\n".join(parts) + "\n").encode())
    spreads = spreads_json(records)
    if spreads:
        write_atomically(records.folder / "client_spread.json", (_json(spreads) + "\n").encode())
    return path


def tables(records: RunRecords) -> list[TextTable]:
    """The parts of the report; a part without content is left out."""
    servers = [part for kind in _KINDS for part in server_tables(records, kind)]
    clients = [clients_table(records, kind) for kind in _KINDS]
    parts = [
        *servers,
        *clients,
        traffic_table(records),
        exclusions_table(records),
        shortenings_table(records),
        refusals_table(records),
    ]
    return [part for part in parts if part.rows]


def server_tables(records: RunRecords, kind: str) -> Iterator[TextTable]:
    """The server's recalls with what they depend on, and its other metrics."""
    metrics = records.last(SERVER, kind)
    found = find_recalls(metrics)
    if found:
        yield _recall_table(records, kind, found)
    shown = [name for name in metrics if not is_context(name) and name not in {recall.name for recall in found}]
    rows = [(name, figure(metrics[name]), *_best(records, kind, name)) for name in shown]
    notes = () if found else (_context([metrics]),)
    yield TextTable(f"Server, {kind}: metrics", ("metric", "final", "best", "(round)"), rows, notes)


def clients_table(records: RunRecords, kind: str) -> TextTable:
    """Mean, worst client, disparity and standard deviation of each metric over each group's clients."""
    rows: list[tuple[str, ...]] = []
    notes = [
        "Over the clients that have a value, each after its own last evaluation. Worst: lowest value, of a loss the "
        "highest. Disparity: highest minus lowest; it says something only of clients that were measured alike."
    ]
    for group, clients in spread_over(records).items():
        last = [records.last(client, kind) for client in clients]
        rows += [_spread_row(client_spread(records, group, name, kind)) for name in quality_names(last)]
        if any(last):
            notes.append(f"{group}: {_context(last)}")
    columns = ("group: metric", "clients", "mean", "worst", "(client)", "best", "disparity", "std")
    return TextTable(f"Clients, {kind}", columns, rows, notes)


def traffic_table(records: RunRecords) -> TextTable:
    """Bytes that crossed, by direction."""
    directions = {"down": "server to clients", "up": "clients to server"}
    rounds = max(1, len({transfer.round for transfer in records.transfers}))
    totals = {label: records.total_bytes(direction) for direction, label in directions.items()}
    totals["both"] = sum(totals.values())
    rows = [(label, f"{total:,}", mib(total), mib(total / rounds)) for label, total in totals.items() if total]
    return TextTable("Communication", ("direction", "bytes", "MiB", "MiB a round"), rows, _savings(records))


def exclusions_table(records: RunRecords) -> TextTable:
    """Clients that were left out of rounds, with the latest reason."""
    return _of_clients("Excluded clients", records.excluded())


def shortenings_table(records: RunRecords) -> TextTable:
    """Clients whose updates were scaled down, with the latest reason."""
    return _of_clients("Shortened updates", records.shortened())


def _of_clients(title: str, events: Sequence[EventRecord]) -> TextTable:
    latest: Mapping[str, EventRecord] = {event.participant: event for event in events}
    times = Counter(event.participant for event in events)
    rows = [(client, str(times[client]), str(event.round), event.reason) for client, event in latest.items()]
    return TextTable(title, ("client", "rounds", "last in round", "last reason"), rows)


def refusals_table(records: RunRecords) -> TextTable:
    """Nodes of a deployment that were not what they claimed to be."""
    rows = [
        (event.participant, str(event.round), event.reason) for event in records.events if event.event == SITE_REFUSED
    ]
    return TextTable("Refused sites", ("site", "round", "reason"), rows)


def _savings(records: RunRecords) -> tuple[str, ...]:
    """What ``run.transport`` saved, if anything."""
    sent, full = records.total_bytes(), records.full_bytes()
    return () if sent == full else (f"{mib(sent)} MiB instead of {mib(full)} MiB (fp32, everything whole).",)


def _title(records: RunRecords) -> str:
    seconds = sum(records.seconds.values())
    took = f" in {duration(seconds)}" if seconds else ""
    return f"{records.name}: {records.rounds} rounds{took}, {len(records.clients)} clients"


def _where(records: RunRecords) -> str:
    return f"Records, plots, models and checkpoints are in {records.folder}"


def _recall_table(records: RunRecords, kind: str, found: list[Recall]) -> TextTable:
    columns = (
        "recall",
        "final",
        "best",
        "(round)",
        "chance",
        "final / chance",
        "gallery",
        "folds",
        "positives",
    )
    rows = [
        (
            f"{recall.direction} R@{recall.cutoff}{f' ({recall.protocol})' if recall.protocol else ''}",
            figure(recall.value),
            *_best(records, kind, recall.name),
            figure(recall.chance, 3),
            figure(recall.times_chance, 1),
            count(recall.gallery),
            count(recall.folds),
            count(recall.positives),
        )
        for recall in found
    ]
    notes = (
        "Percent. Gallery: entries that a query is compared with (mean over folds). "
        "Ties count against the model. Chance: a random order of that gallery.",
    )
    return TextTable(f"Server, {kind}: retrieval", columns, rows, notes)


def _best(records: RunRecords, kind: str, metric: str) -> tuple[str, str]:
    best = None if metric == "loss" else records.best(SERVER, metric, kind)
    return (figure(best[1]), str(best[0])) if best else ("-", "-")


def _spread_row(spread: ClientSpread) -> tuple[str, ...]:
    spreads = (figure(number) for number in (spread.best, spread.disparity, spread.std))
    return (
        f"{spread.group}: {spread.metric}",
        f"{len(spread.values)} of {spread.clients}",
        figure(spread.mean),
        figure(spread.worst),
        spread.worst_client or "-",
        *spreads,
    )


def _json(spreads: Mapping[str, Any]) -> str:
    """JSON without NaN: a metric that no client has a finite value of has nulls."""
    plain = json.loads(json.dumps(spreads), parse_constant=lambda _: None)
    return json.dumps(plain, indent=1)


def _context(measured: Sequence[Mapping[str, float]]) -> str:
    """What the figures depend on, as means over those who were measured, with their range where they differ."""
    names = [name for name in dict.fromkeys(chain(*measured)) if is_context(name)]
    found = {name: [metrics[name] for metrics in measured if name in metrics] for name in names}
    return "Measured with " + ", ".join(f"{name} {_mean_of(values)}" for name, values in found.items()) + "."


def _mean_of(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return count(fmean(values)) + (f" ({count(low)} to {count(high)})" if low != high else "")
