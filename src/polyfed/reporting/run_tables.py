"""Tables of a run: what the server and the clients reached, held and sent, and what befell them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from polyfed.core.errors import RunError
from polyfed.core.untrusted import file_json
from polyfed.reporting.metrics import (
    EVALUATIONS,
    chance_of,
    client_spreads,
    common_chance,
    is_context,
    main_metric,
    recalls_and_others,
    spread_over,
    teaching,
)
from polyfed.reporting.statistics import finite_mean
from polyfed.reporting.summary import component_name, setting
from polyfed.reporting.tables import TextTable, byte_size, count, format_number, mib
from polyfed.runs.accounts import ACCOUNTS
from polyfed.runs.events import Incident
from polyfed.runs.records import SERVER, SITE_REFUSED, PartitionEntry, RunRecords, Transfer

if TYPE_CHECKING:
    from polyfed.runs.evaluation import Evaluation

Holdings: TypeAlias = Mapping[str, PartitionEntry]

BYTE_DIRECTIONS = {"down": "server to clients", "up": "clients to server"}
LEAKAGE = "analysis/leakage.json"
_UNALIGNED = 0.5  # mean norm below which unit vectors of several clients agree on little
_WIDEST = 12  # columns; more clients than this stand one below the other
_MOST_INCIDENTS = 2000
_BITS = {"0", "1"}


def tables(records: RunRecords) -> list[TextTable]:
    """The parts of the report; a part without content is left out."""
    refused = [event for event in records.events if event.incident == SITE_REFUSED]
    parts = [
        *(table for kind in EVALUATIONS for table in server_tables(records, kind)),
        *(clients_table(records, kind) for kind in EVALUATIONS),
        teacher_table(records),
        traffic_table(records),
        *leakage_tables(records),
        _by_client("Excluded clients", records.excluded()),
        _by_client("Clipped updates", records.clipped()),
        TextTable(
            "Refused sites", ("site", "round", "reason"), [(e.participant, str(e.round), e.reason) for e in refused]
        ),
    ]
    return [part for part in parts if part.rows]


# ---- metrics


def server_tables(records: RunRecords, kind: str) -> Iterator[TextTable]:
    """Recalls of the server's model with what they depend on, and its other metrics; beside them the last round's."""
    metrics, last = records.metrics(SERVER, kind), records.last(SERVER, kind)
    recalls, others = recalls_and_others(metrics)
    about = f"Value: {records.chosen}. Last: after the last round."
    if recalls:
        columns = ("recall", "value", "last", "chance", "value / chance", "gallery", "folds", "positives")
        rows = [
            (
                recall.label,
                format_number(recall.value),
                format_number(last.get(recall.name, math.nan)),
                format_number(recall.chance, 3),
                format_number(recall.times_chance, 1),
                *map(count, (recall.gallery, recall.folds, recall.positives)),
            )
            for recall in recalls
        ]
        note = "Percent. Gallery: entries that a query is compared with (mean over folds). "
        note += "Ties count against the model. Chance: a random order of that gallery."
        yield TextTable(f"Server, {kind}: retrieval", columns, rows, [about, note])
    values = [
        (name, *map(format_number, (metrics[name], last.get(name, math.nan), chance_of(name, metrics))))
        for name in others
    ]
    # the table of recalls has columns for what they depend on
    notes = (about,) if recalls else (about, _context([metrics]))
    yield TextTable(f"Server, {kind}: metrics", ("metric", "value", "last", "chance"), values, notes)


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
        apart = (spread.disparity, spread.std) if len(spread.values) > 1 else (math.nan, math.nan)
        chance = common_chance(spread.metric, [records.last(client, kind) for client in spread.values])
        mean, worst, *others = map(format_number, (spread.mean, spread.worst, spread.best, *apart, chance))
        rows.append((name, measured, mean, worst, spread.worst_client or "-", *others))
    for group, clients in spread_over(records).items():
        last = [records.last(client, kind) for client in clients]
        if any(last):
            notes.append(f"{group}: {_context(last)}")
    columns = ("group: metric", "clients", "mean", "worst", "(client)", "best", "disparity", "std", "chance")
    return TextTable(f"Clients, {kind}", columns, rows, notes)


def evaluation_tables(evaluation: Evaluation) -> list[TextTable]:
    """Of a model on any data: recalls with what they depend on, and the other metrics."""
    size = f"{evaluation.items:,} items, {evaluation.samples:,} samples"
    title = f"{evaluation.data}, {evaluation.split}: {size}; {evaluation.model} model of round {evaluation.round}"
    metrics = evaluation.metrics
    recalls, others = recalls_and_others(metrics)
    rows = [
        (
            recall.label,
            format_number(recall.value),
            format_number(recall.chance, 3),
            *map(count, (recall.gallery, recall.positives)),
        )
        for recall in recalls
    ]
    note = "Percent. Gallery: entries that a query is compared with. Ties count against the model."
    values = [(name, *map(format_number, (metrics[name], chance_of(name, metrics)))) for name in others]
    context = list(filter(None, [_context([metrics])]))
    parts = [
        TextTable(title, ("recall", "value", "chance", "gallery", "positives"), rows, [note]),
        TextTable("" if recalls else title, ("metric", "value", "chance"), values, context),
    ]
    return [part for part in parts if part.rows]


def _context(measured: Sequence[Mapping[str, float]]) -> str:
    parts = []
    for name in dict.fromkeys(chain(*measured)):
        if is_context(name) and not name.endswith("_of_constant"):
            values = [metrics[name] for metrics in measured if name in metrics]
            low, high = map(count, (min(values), max(values)))
            parts.append(f"{name} {count(finite_mean(values))}{f' ({low} to {high})' if low != high else ''}")
    return f"Measured with {', '.join(parts)}." if parts else ""


def teacher_table(records: RunRecords) -> TextTable:
    """Whether the clients' ensemble is a teacher that the server can learn from: first and last round.

    Quality of the ensemble beside the server's own, norms of the raw mean, and distances.
    """
    series = {name: records.series(SERVER, name, "train") for name in records.metric_names(SERVER, "train")}
    rows = [
        (_instrument(name), *(format_number(values[number]) for number in (min(values), max(values))))
        for name, values in sorted(series.items())
        if name.startswith(("teacher.", "student.", "mean_norm.", "kd_distance_"))
        and name.rpartition(".")[2] not in records.clients
        and name != "teacher.gallery"
    ]
    metrics = {name: values[max(values)] for name, values in series.items() if values}
    notes = [_ranking(*each, held_out=metrics["teacher.gallery"]) for each in teaching(metrics)]
    norms = [value for name, value in metrics.items() if name.startswith("mean_norm.")]
    if norms and finite_mean(norms) < _UNALIGNED:
        notes.append(
            f"The clients' mean has norm {format_number(finite_mean(norms))}, where 1 would be agreement: their spaces "
            "are not aligned; see algorithm.teacher.alignment and distiller.loss similarity."
        )
    return TextTable("What the clients teach the server", ("", "first", "last"), rows, notes)


def _instrument(name: str) -> str:
    family, _, detail = name.partition(".")
    metric, _, output = detail.partition(".")
    if family == "mean_norm":
        return f"norm of the clients' mean, {detail}"
    if family.startswith("kd_distance_"):
        return f"distance to the targets {family.removeprefix('kd_distance_')} distillation, {detail}"
    if family == "student":
        return f"server: {metric}"
    return f"ensemble: {metric}" + (f", its {output} beside the server's others" if output else "")


def _ranking(metric: str, ensemble: float, server: float, *, held_out: float) -> str:
    where = f"{held_out:.0f} held-out samples" if held_out else "public pairs that the server trains on itself"
    values = f"{metric} {format_number(ensemble)} against {format_number(server)} on {where}"
    if ensemble > server:
        return f"The ensemble ranks better than the server ({values}): there is much to learn."
    if held_out:
        return f"The ensemble ranks worse than the server ({values}): it teaches nothing."
    return f"The ensemble ranks worse than the server ({values}); set public.gallery to compare them on others."


# ---- what was sent, and what befell whom


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


def bytes_by(records: RunRecords, key: Callable[[Transfer], str]) -> dict[str, Counter[str]]:
    """Key of a transfer, such as its client -> direction -> bytes."""
    totals: dict[str, Counter[str]] = {}
    for transfer in records.transfers:
        totals.setdefault(key(transfer), Counter())[transfer.direction] += transfer.bytes
    return totals


def leakage_tables(records: RunRecords) -> list[TextTable]:
    """What ``polyfed analyse leakage`` found in the run; nothing if nobody asked.

    Raises:
        RunError: its file is damaged.
    """
    path = records.folder / LEAKAGE
    if not path.is_file():
        return []
    try:
        return [TextTable(**table) for table in file_json(path.read_text())["tables"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"'{path}' is damaged ({type(error).__name__}: {error}); remove it, or analyse again") from error


def table_json(table: TextTable) -> dict[str, Any]:
    return {key: [*value] if key != "title" else value for key, value in vars(table).items()}


def _by_client(title: str, events: Sequence[Incident]) -> TextTable:
    """A row a client and cause; records of earlier versions tell no causes."""
    # events come by round, so the last of a client stays
    latest = {(event.cause, event.participant): event for event in events}
    times = Counter((event.cause, event.participant) for event in events)
    rows = [
        (event.participant, event.cause or "-", str(times[key]), str(event.round), event.reason)
        for key, event in sorted(latest.items(), key=lambda item: item[0][0])
    ]
    columns = ("client", "cause", "rounds", "last in round", "last reason")
    if not any(event.cause for event in events):
        return TextTable(title, (columns[0], *columns[2:]), [(row[0], *row[2:]) for row in rows])
    return TextTable(title, columns, rows)


def incidents_table(records: RunRecords) -> TextTable:
    """One row an incident, the latest if there are too many."""
    events = sorted(records.events, key=lambda event: event.round)
    latest = events[-_MOST_INCIDENTS:]
    rows = [(str(e.round), e.participant, e.title, e.reason) for e in latest]
    title = f"Events{'' if len(latest) == len(events) else f' (the last {len(latest):,} of {len(events):,})'}"
    return TextTable(title, ("round", "participant", "event", "reason"), rows)


# ---- one row a client


def clients_page_table(records: RunRecords) -> TextTable:
    """What each client is, what it holds, how well it does, and what it sent; columns without content are left out."""
    columns = {label: list(cells) for label, cells in _client_columns(records)}
    shown = {label: cells for label, cells in columns.items() if any(cell not in ("", "-") for cell in cells)}
    note = "Metrics are of each client's own last evaluation on its test samples, in the round it was measured in."
    return TextTable("Clients", list(shown), list(zip(*shown.values(), strict=True)), (note,))


def _client_columns(records: RunRecords) -> Iterator[tuple[str, Sequence[str]]]:
    names, groups, descriptions = records.clients, records.groups, client_descriptions(records)
    yield "client", names
    yield "group", [group for name in names for group, members in groups.items() if name in members]
    for label in ("task", "modalities", "architecture"):
        yield label, [descriptions[name].get(label, "") for name in names]
    for label in ("items", "samples"):
        yield label, [_integer(getattr(records.holdings.get(name), label, None)) for name in names]
    # groups with different tasks have different metrics: each gets a column, with dashes for the others
    mains = dict.fromkeys(main_metric(records, members) for members in groups.values())
    for metric in (*filter(None, mains), "loss"):
        yield metric, [format_number(records.last(name).get(metric, math.nan)) for name in names]
    measured = [max(records.series(name, main_metric(records, [name])), default=None) for name in names]
    # clients are measured in the rounds they take part in, so metrics side by side may be of different rounds
    if len(set(measured)) > 1:
        yield "measured in", list(map(_integer, measured))
    if records.transfers:
        yield from _effort_columns(records)
    if records.excluded():
        times = [[event for event in records.excluded() if event.participant == name] for name in names]
        yield "excluded", [_integer(len(events)) for events in times]
        yield "last reason", [f"round {events[-1].round}: {events[-1].reason}" if events else "" for events in times]


def _effort_columns(records: RunRecords) -> Iterator[tuple[str, Sequence[str]]]:
    # evaluation and setup, whose steps have a colon in their names, do not count as answers
    answers = {
        (sent.client, sent.round) for sent in records.transfers if sent.direction == "up" and ":" not in sent.step
    }
    rounds, bytes_sent = Counter(client for client, _ in answers), bytes_by(records, lambda sent: sent.client)
    yield "rounds", [_integer(rounds[name]) for name in records.clients]
    for direction in ("up", "down"):
        numbers = [bytes_sent.get(name, Counter())[direction] for name in records.clients]
        yield f"bytes {direction}", [byte_size(number) if number else "0" for number in numbers]


def client_descriptions(records: RunRecords) -> dict[str, dict[str, str]]:
    """Client id -> its ``task``, ``modalities`` and ``architecture``, as far as the configuration tells them."""
    return {
        client: _description(records.section("clients").get(group), client)
        for group, clients in records.groups.items()
        for client in clients
    }


def _description(group: Any, client: str) -> dict[str, str]:
    description = {"task": component_name(setting(group, "task"))}
    models = setting(group, "models")
    number = re.search(r"-(\d+)$", client)
    if not isinstance(models, list) or not models or (number is None and len(models) > 1):
        return description
    # the models of a group are dealt out in turn: client <group>-k has number k modulo their number
    encoders = setting(models[int(number[1]) % len(models) if number else 0], "encoders")
    if isinstance(encoders, Mapping):
        description["modalities"] = ", ".join(map(str, encoders))
        description["architecture"] = " + ".join(f"{component_name(e)} {_size(e)}".strip() for e in encoders.values())
    return description


def _size(encoder: Any) -> str:
    widths, size, width = (setting(encoder, key) for key in ("widths", "size", "width"))
    if isinstance(widths, list) and widths:
        return "-".join(map(str, widths))
    return size if isinstance(size, str) else str(width) if isinstance(width, int) else ""


def _integer(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


# ---- who holds what


def partition_groups(holdings: Holdings) -> dict[str, dict[str, PartitionEntry]]:
    """Group -> its clients -> what they hold."""
    groups: dict[str, dict[str, PartitionEntry]] = {}
    for client, holding in holdings.items():
        groups.setdefault(holding.group, {})[client] = holding
    return groups


def sources_of(held: Holdings) -> list[str]:
    """Sources and splits of what clients hold, that which they hold in addition marked as such."""
    own = dict.fromkeys(f"{holding.source} {holding.split}".strip() for holding in held.values())
    also = [holding.also for holding in held.values() if holding.also]
    additional = dict.fromkeys(
        f"+ {each['source']} {each['split']}{', public' * bool(each['public'])}" for each in also
    )
    return [*filter(None, own), *additional]


def partition_tables(holdings: Holdings) -> list[TextTable]:
    """Items by class, and by value of the columns that make the class, one client a column."""
    return [table for group, held in partition_groups(holdings).items() for table in _group_tables(group, held)]


def _group_tables(group: str, held: Holdings) -> Iterator[TextTable]:
    sizes = [
        (client, f"{holding.items:,}", f"{holding.samples:,}", f"{holding.test['items']:,}" if holding.test else "-")
        for client, holding in held.items()
    ]
    yield TextTable(
        f"{group}: sizes", ("client", "items", "samples", "test items"), sizes, tuple(_partition_notes(held))
    )
    counts = column_counts(held)
    if any(counts.values()):
        yield _matrix(f"{group}: items by column", held, counts)
    if any(holding.labels for holding in held.values()):
        names = classes_of(held)
        by_class = {
            client: {name: (holding.labels or {}).get(name, 0) for name in names} for client, holding in held.items()
        }
        yield _matrix(f"{group}: items by class", held, by_class)


def _matrix(title: str, held: Holdings, counts: Mapping[str, Mapping[str, int]]) -> TextTable:
    """Counts with clients as columns, or as rows where they are many, and the sum over clients or names."""
    names = short_names(list(next(iter(counts.values()))), held)
    by_client = [(client, *(f"{n:,}" for n in (*row.values(), sum(row.values())))) for client, row in counts.items()]
    if len(counts) > _WIDEST:
        return TextTable(title, ("client", *names, "all"), by_client)
    of_all = [f"{sum(column):,}" for column in zip(*(row.values() for row in counts.values()), strict=True)]
    columns = [row[1:-1] for row in by_client]
    return TextTable(title, ("", *counts, "all"), list(zip(names, *columns, of_all, strict=True)))


def column_counts(held: Holdings) -> dict[str, dict[str, int]]:
    """Client -> what is counted of the columns -> items: of a 0/1 column those with 1, else those with each value.

    Nothing where the class is that of a single column.
    """
    values = _values_by_column(held)
    # of a single column the table by class says the same
    if len(values) < 2:
        return {client: {} for client in held}
    counted = {
        (column if set(names) <= _BITS else f"{column} {name}"): (column, name)
        for column, names in values.items()
        for name in (["1"] if set(names) <= _BITS else names)
    }
    return {
        client: {label: holding.columns.get(column, {}).get(name, 0) for label, (column, name) in counted.items()}
        for client, holding in held.items()
    }


def classes_of(held: Holdings) -> list[str]:
    """Names of all classes that the clients hold: combinations of 0/1 columns as binary numbers, others sorted."""
    names = {name for holding in held.values() for name in holding.labels or ()}
    values = _values_by_column(held)
    # combinations are ordered like binary numbers: none, the first, the second, both
    bits = {column: 1 << index for index, column in enumerate(values)}
    if values and all(set(counted) <= _BITS for counted in values.values()):
        return sorted(names, key=lambda name: sum(bits.get(part, 0) for part in name.split("+")))
    # class 10 stands behind class 9
    return sorted(names, key=lambda name: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", name)])


def short_names(names: list[str], held: Holdings) -> list[str]:
    """Names of classes or columns without the word that all columns begin with, such as ``mention_``."""
    columns = list(next(iter(held.values())).columns) if held else []
    heads = {column.partition("_")[0] if "_" in column else "" for column in columns}
    if len(columns) < 2 or len(heads) != 1 or "" in heads:
        return names
    return [name.replace(f"{min(heads)}_", "") for name in names]


def _values_by_column(held: Holdings) -> dict[str, dict[str, None]]:
    values: dict[str, dict[str, None]] = {}
    for holding in held.values():
        for column, counts in holding.columns.items():
            values.setdefault(column, {}).update(dict.fromkeys(counts))
    return values


def _partition_notes(held: Holdings) -> Iterator[str]:
    # what is left out, or held in addition, is the same for all clients of a group
    first = next(iter(held.values()))
    if first.left_out:
        items = ", ".join(f"{number:,} without {column}" for column, number in first.left_out.items())
        yield f"Left out of '{first.source}' {first.split}: {items}."
    missing = sum((Counter(holding.missing) for holding in held.values()), Counter[str]())
    if missing:
        without = ", ".join(f"{number:,} without {name}" for name, number in sorted(missing.items()))
        yield f"Of the items of '{first.source}' {first.split}: {without}."
    if parts := [holding.also for holding in held.values() if holding.also]:
        sums = ", ".join(f"{sum(part[what] for part in parts):,} {what}" for what in ("items", "samples"))
        origin = f"{'the public set, ' if parts[0]['public'] else ''}'{parts[0]['source']}' {parts[0]['split']}"
        yield f"Counted above, but held in addition: {sums} of {origin}."


# ---- what was read of the data

_NONE = "-"


def account_table(accounts: Mapping[str, Sequence[Mapping[str, Any]]]) -> TextTable:
    """Rows of counts, each with its reasons.

    Args:
        accounts: source -> counts, as ``Count.plain`` gives them.
    """
    rows = [
        (
            f"{source}: {entry['unit']}",
            count(int(entry["found"])),
            count(int(entry["read"])),
            "; ".join(f"{number:,} {reason}" for reason, number in entry["left_out"].items()) or _NONE,
        )
        for source, counts in accounts.items()
        for entry in counts
    ]
    return TextTable("What was read of the data", ("", "found", "read", "left out"), rows)


def recorded_accounts(folder: Path) -> list[TextTable]:
    """The table of a run folder; none of runs that recorded no accounts, or of a damaged record."""
    try:
        return [account_table(file_json((folder / ACCOUNTS).read_bytes()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
