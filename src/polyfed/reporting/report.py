"""The report that ends a run: tables as ``report.md``, and figures about clients as ``client_spread.json``.

Measurements of a saved model on other data are shown as tables of the same kind.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from polyfed.core.files import write_atomically
from polyfed.reporting.client_spread import client_spreads, quality_names, spread_over, spreads_json
from polyfed.reporting.headline import common_chance
from polyfed.reporting.markup import markdown_templates
from polyfed.reporting.recalls import chance_of, find_recalls, is_context
from polyfed.reporting.saved_tables import leakage_parts
from polyfed.reporting.statistics import finite_mean
from polyfed.reporting.tables import TextTable, count, duration, format_number, mib
from polyfed.reporting.teacher import teacher_table
from polyfed.reporting.traffic import BYTE_DIRECTIONS
from polyfed.runs.events import Incident
from polyfed.runs.records import SERVER, SITE_REFUSED, RunRecords

if TYPE_CHECKING:
    from polyfed.runs.evaluation import Evaluation

_KINDS = ("test", "validation")


def write_report(records: RunRecords) -> Path:
    """Write ``report.md``, and ``client_spread.json`` if clients were measured; returns the former."""
    from markupsafe import Markup

    template = markdown_templates().get_template("report.md.j2")
    parts = [Markup(table.markdown()) for table in tables(records)]
    seconds = sum(records.seconds.values())
    took = f" in {duration(seconds)}" if seconds else ""
    title = f"{records.name}: {records.rounds} rounds{took}, {len(records.clients)} clients"
    text = template.render(title=title, warnings=records.warnings, tables=parts)
    path = records.folder / "report.md"
    write_atomically(path, text.encode())
    spreads = spreads_json(records)
    if spreads:
        # JSON has no NaN: of a metric that no client has a finite value of, figures are null
        content = json.loads(json.dumps(spreads), parse_constant=lambda _: None)
        write_atomically(records.folder / "client_spread.json", (json.dumps(content, indent=1) + "\n").encode())
    return path


def tables(records: RunRecords) -> list[TextTable]:
    """The parts of the report; a part without content is left out."""
    refused = [event for event in records.events if event.incident == SITE_REFUSED]
    parts = [
        *(table for kind in _KINDS for table in server_tables(records, kind)),
        *(clients_table(records, kind) for kind in _KINDS),
        teacher_table(records),
        traffic_table(records),
        *leakage_parts(records),
        _happened("Excluded clients", records.excluded()),
        _happened("Clipped updates", records.clipped()),
        TextTable(
            "Refused sites", ("site", "round", "reason"), [(e.participant, str(e.round), e.reason) for e in refused]
        ),
    ]
    return [part for part in parts if part.rows]


def server_tables(records: RunRecords, kind: str) -> Iterator[TextTable]:
    """The server's recalls with what they depend on, and its other metrics."""
    metrics = records.last(SERVER, kind)
    recalls = find_recalls(metrics)
    if recalls:
        columns = ("recall", "final", "best", "(round)", "chance", "final / chance", "gallery", "folds", "positives")
        rows = [
            (
                recall.label,
                format_number(recall.value),
                *_best(records, kind, recall.name),
                format_number(recall.chance, 3),
                format_number(recall.times_chance, 1),
                *map(count, (recall.gallery, recall.folds, recall.positives)),
            )
            for recall in recalls
        ]
        note = "Percent. Gallery: entries that a query is compared with (mean over folds). "
        note += "Ties count against the model. Chance: a random order of that gallery."
        yield TextTable(f"Server, {kind}: retrieval", columns, rows, [note])
    names = {*quality_names([metrics])} - {recall.name for recall in recalls}
    shown = [name for name in metrics if name in names]
    others = [
        (one, format_number(metrics[one]), *_best(records, kind, one), format_number(chance_of(one, metrics)))
        for one in shown
    ]
    # the table of recalls has columns for what they depend on
    notes = () if recalls else (_context([metrics]),)
    yield TextTable(f"Server, {kind}: metrics", ("metric", "final", "best", "(round)", "chance"), others, notes)


def clients_table(records: RunRecords, kind: str) -> TextTable:
    """Mean, worst client, disparity and standard deviation of each metric over each group's clients."""
    rows: list[tuple[str, ...]] = []
    notes = [
        "Over the clients that have a value, each after its own last evaluation. Worst: lowest value, of a loss the "
        "highest. Disparity: highest minus lowest; it says something only of clients that were measured alike. Chance: "
        "what guessing reaches on their own test samples, mean over them."
    ]
    for spread in client_spreads(records, kind):
        name, measured = f"{spread.group}: {spread.metric}", f"{len(spread.values)} of {spread.clients}"
        worst = (format_number(spread.worst), spread.worst_client or "-")
        apart = (spread.disparity, spread.std) if len(spread.values) > 1 else (math.nan, math.nan)
        chance = common_chance(spread.metric, [records.last(client, kind) for client in spread.values])
        rows.append(
            (name, measured, format_number(spread.mean), *worst, *map(format_number, (spread.best, *apart, chance)))
        )
    for group, clients in spread_over(records).items():
        last = [records.last(client, kind) for client in clients]
        if any(last):
            notes.append(f"{group}: {_context(last)}")
    columns = ("group: metric", "clients", "mean", "worst", "(client)", "best", "disparity", "std", "chance")
    return TextTable(f"Clients, {kind}", columns, rows, notes)


def traffic_table(records: RunRecords) -> TextTable:
    """Bytes that crossed, by direction, and what ``run.exchange.transport`` saved, if anything."""
    # an empty ledger has no round to divide by
    rounds = max(1, len({transfer.round for transfer in records.transfers}))
    totals = {label: records.total_bytes(direction) for direction, label in BYTE_DIRECTIONS.items()}
    sent, full = sum(totals.values()), records.full_bytes()
    totals["both"] = sent
    rows = [(label, f"{total:,}", mib(total), mib(total / rounds)) for label, total in totals.items() if total]
    notes = [] if sent == full else [f"{mib(sent)} MiB instead of {mib(full)} MiB (fp32, everything whole)."]
    notes.append(f"{records.replies_in_words}.".capitalize())
    return TextTable("Communication", ("direction", "bytes", "MiB", "MiB a round"), rows, notes)


def evaluation_tables(evaluation: Evaluation) -> list[TextTable]:
    """Of a model on any data: recalls with what they depend on, and the other metrics."""
    size = f"{evaluation.items:,} items, {evaluation.samples:,} samples"
    title = f"{evaluation.data}, {evaluation.split}: {size}; {evaluation.model} model of round {evaluation.round}"
    recalls = find_recalls(evaluation.metrics)
    rows = [
        (r.label, format_number(r.value), format_number(r.chance, 3), count(r.gallery), count(r.positives))
        for r in recalls
    ]
    note = "Percent. Gallery: entries that a query is compared with. Ties count against the model."
    quality = dict.fromkeys(quality_names([evaluation.metrics]))
    for recall in recalls:
        quality.pop(recall.name, None)
    metrics, notes = evaluation.metrics, list(filter(None, [_context([evaluation.metrics])]))
    others = [(name, format_number(metrics[name]), format_number(chance_of(name, metrics))) for name in quality]
    parts = [
        TextTable(title, ("recall", "value", "chance", "gallery", "positives"), rows, [note]),
        TextTable("" if recalls else title, ("metric", "value", "chance"), others, notes),
    ]
    return [part for part in parts if part.rows]


def _happened(title: str, events: Sequence[Incident]) -> TextTable:
    # events come by round, so the last of a participant stays
    latest = {event.participant: event for event in events}
    times = Counter(event.participant for event in events)
    rows = [(client, str(times[client]), str(event.round), event.reason) for client, event in latest.items()]
    return TextTable(title, ("client", "rounds", "last in round", "last reason"), rows)


def _best(records: RunRecords, kind: str, metric: str) -> tuple[str, str]:
    # the best is the highest, which of a loss is the worst
    best = None if metric == "loss" else records.best(SERVER, metric, kind)
    return (format_number(best[1]), str(best[0])) if best else ("-", "-")


def _context(measured: Sequence[Mapping[str, float]]) -> str:
    parts = []
    told = (name for name in dict.fromkeys(chain(*measured)) if is_context(name) and not name.endswith("_of_constant"))
    for name in told:
        values = [metrics[name] for metrics in measured if name in metrics]
        low, high = min(values), max(values)
        parts.append(f"{name} {count(finite_mean(values))}{f' ({count(low)} to {count(high)})' if low != high else ''}")
    return f"Measured with {', '.join(parts)}." if parts else ""
