"""Tables of a run: metrics, data, bytes and incidents of the server and the clients."""

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
from polyfed.reporting.summary import RunSummary, component_name, setting
from polyfed.reporting.tables import Cell, TextTable, byte_size, count, format_number, mib
from polyfed.runs.events import Incident
from polyfed.runs.folder import ACCOUNTS
from polyfed.runs.records import SERVER, SITE_REFUSED, PartitionEntry, RunRecords, Transfer

if TYPE_CHECKING:
    from polyfed.runs.evaluation import Evaluation

Holdings: TypeAlias = Mapping[str, PartitionEntry]

BYTE_DIRECTIONS = {"down": "server to clients", "up": "clients to server"}
LEAKAGE = "analysis/leakage.json"
_UNALIGNED = 0.5  # mean norm below which unit vectors of several clients agree on little
_WIDEST = 12  # clients up to which each is a column
_MOST_INCIDENTS = 2000
_BITS = {"0", "1"}
_TEACHING = ("teacher.", "student.", "mean_norm.", "kd_distance_")
_TIES = "Ties count against the model."


def tables(records: RunRecords) -> list[TextTable]:
    """Tables of the report; a table without rows is left out."""
    refused = [event for event in records.events if event.incident == SITE_REFUSED]
    by_site = [{"site": one.participant, "round": str(one.round), "reason": one.reason} for one in refused]
    parts = [
        *(table for split in EVALUATIONS for table in server_tables(records, split)),
        *(clients_table(records, split) for split in EVALUATIONS),
        teacher_table(records),
        traffic_table(records),
        *leakage_tables(records),
        _by_client("Excluded clients", records.excluded()),
        _by_client("Clipped updates", records.clipped()),
        TextTable.of("Refused sites", by_site),
    ]
    return [part for part in parts if part.rows]


# ---- metrics


def server_tables(records: RunRecords, split: str) -> Iterator[TextTable]:
    """Recalls of the server's model with their conditions, and its other metrics; each with that of the last round."""
    metrics, last = records.metrics(SERVER, split), records.last(SERVER, split)
    about = f"Value: {records.chosen}. Last: after the last round."
    recalls, others = _metric_tables(f"Server, {split}: ", metrics, about, last)
    yield from (recalls, others) if recalls.rows else (others,)


def evaluation_tables(evaluation: Evaluation) -> list[TextTable]:
    """Metrics of a model on any data: recalls with their conditions, and others."""
    size = f"{evaluation.items:,} items, {evaluation.samples:,} samples"
    title = f"{evaluation.data}, {evaluation.split}: {size}; {evaluation.model} model of round {evaluation.round}: "
    return [table for table in _metric_tables(title, evaluation.metrics) if table.rows]


def _metric_tables(
    title: str, metrics: Mapping[str, float], about: str = "", last: Mapping[str, float] | None = None
) -> tuple[TextTable, TextTable]:
    """Table of recalls and table of other metrics, with the values of the last round where they are given."""
    recalls, others = recalls_and_others(metrics)

    def last_of(name: str) -> dict[str, Cell]:
        return {} if last is None else {"last": last.get(name, math.nan)}

    of_recalls: list[dict[str, Cell]] = [
        {
            "recall": recall.label,
            "value": recall.value,
            **last_of(recall.name),
            "chance": format_number(recall.chance, 3),
            "value / chance": format_number(recall.times_chance, 1),
            "gallery": count(recall.gallery),
            "folds": count(recall.folds),
            "positives": count(recall.positives),
        }
        for recall in recalls
    ]
    of_others: list[dict[str, Cell]] = [
        {"metric": name, "value": metrics[name], **last_of(name), "chance": chance_of(name, metrics)} for name in others
    ]
    gallery = f"Percent. Gallery: entries that a query is compared with (mean over folds). {_TIES} "
    gallery += "Chance: a random order of that gallery."
    conditions = "" if recalls and last is not None else _context([metrics])  # columns of the recalls have them
    return (
        TextTable.of(f"{title}retrieval", of_recalls, list(filter(None, [about, gallery]))),
        TextTable.of(f"{title}metrics", of_others, list(filter(None, [about, conditions]))),
    )


def clients_table(records: RunRecords, split: str) -> TextTable:
    """Mean, worst client, disparity and standard deviation of each metric over each group's clients."""
    rows: list[dict[str, Cell]] = []
    notes = [
        "Over the clients that have a value, each after its own last evaluation. Worst: lowest value, of a loss the "
        "highest. Disparity: highest minus lowest; compare it only between clients that were measured alike. Chance: "
        "the value of guessing on their own test samples, mean over them."
    ]
    for spread in client_spreads(records, split):
        several = len(spread.values) > 1
        rows.append(
            {
                "group: metric": f"{spread.group}: {spread.metric}",
                "clients": f"{len(spread.values)} of {spread.clients}",
                "mean": spread.mean,
                "worst": spread.worst,
                "(client)": spread.worst_client or None,
                "best": spread.best,
                "disparity": spread.disparity if several else None,
                "std": spread.std if several else None,
                "chance": common_chance(spread.metric, [records.last(client, split) for client in spread.values]),
            }
        )
    for group, clients in spread_over(records).items():
        last = [records.last(client, split) for client in clients]
        if any(last):
            notes.append(f"{group}: {_context(last)}")
    return TextTable.of(f"Clients, {split}", rows, notes)


def _context(measured: Sequence[Mapping[str, float]]) -> str:
    parts = []
    for name in dict.fromkeys(chain(*measured)):
        if is_context(name) and not name.endswith("_of_constant"):
            values = [metrics[name] for metrics in measured if name in metrics]
            low, high = map(count, (min(values), max(values)))
            parts.append(f"{name} {count(finite_mean(values))}{f' ({low} to {high})' if low != high else ''}")
    return f"Measured with {', '.join(parts)}." if parts else ""


def teacher_table(records: RunRecords) -> TextTable:
    """First and last value of each measure of the clients' ensemble as a teacher of the server.

    Quality of the ensemble and of the server, norms of the raw mean, and distances.
    """
    series = {name: records.series(SERVER, name, "train") for name in records.metric_names(SERVER, "train")}
    rows: list[dict[str, Cell]] = [
        {"": _measure(name), "first": values[min(values)], "last": values[max(values)]}
        for name, values in sorted(series.items())
        if name.startswith(_TEACHING) and name.rpartition(".")[2] not in records.clients and name != "teacher.gallery"
    ]
    metrics = {name: values[max(values)] for name, values in series.items() if values}
    notes = [_ranking(*each, held_out=metrics["teacher.gallery"]) for each in teaching(metrics)]
    norms = [value for name, value in metrics.items() if name.startswith("mean_norm.")]
    if norms and finite_mean(norms) < _UNALIGNED:
        notes.append(
            f"The clients' mean has norm {format_number(finite_mean(norms))}, where 1 would be agreement: their spaces "
            "are not aligned; see algorithm.teacher.alignment and distiller.loss similarity."
        )
    return TextTable.of("What the clients teach the server", rows, notes)


def _measure(name: str) -> str:
    family, _, detail = name.partition(".")
    metric, _, output = detail.partition(".")
    if family == "mean_norm":
        return f"norm of the clients' mean, {detail}"
    if family.startswith("kd_distance_"):
        return f"distance to the targets {family.removeprefix('kd_distance_')} distillation, {detail}"
    if family == "student":
        return f"server: {metric}"
    return f"ensemble: {metric}" + (f", its {output} with the server's others" if output else "")


def _ranking(metric: str, ensemble: float, server: float, *, held_out: float) -> str:
    where = f"{held_out:.0f} held-out samples" if held_out else "public pairs that the server trains on itself"
    values = f"{metric} {format_number(ensemble)} against {format_number(server)} on {where}"
    if ensemble > server:
        return f"The ensemble ranks better than the server ({values}): there is much to learn."
    if held_out:
        return f"The ensemble ranks worse than the server ({values}): it teaches nothing."
    return f"The ensemble ranks worse than the server ({values}); set public.gallery to compare them on others."


# ---- communication and incidents


def traffic_table(records: RunRecords) -> TextTable:
    """Bytes by direction, and what ``run.exchange.transport`` saved, if anything."""
    # an empty ledger has no round to divide by
    rounds = max(1, len({transfer.round for transfer in records.transfers}))
    totals = {label: records.total_bytes(direction) for direction, label in BYTE_DIRECTIONS.items()}
    sent, full = sum(totals.values()), records.full_bytes()
    rows: list[dict[str, Cell]] = [
        {"direction": label, "bytes": total, "MiB": mib(total), "MiB per round": mib(total / rounds)}
        for label, total in {**totals, "both": sent}.items()
        if total
    ]
    notes = [] if sent == full else [f"{mib(sent)} MiB instead of {mib(full)} MiB (fp32, uncompressed)."]
    return TextTable.of("Communication", rows, [*notes, f"{records.replies_in_words}.".capitalize()])


def bytes_table(records: RunRecords) -> TextTable:
    """MiB by step and bundle in both directions, the largest first; steps outside the method have a colon."""
    totals = bytes_by(records, lambda sent: f"{sent.step}: {sent.bundle} ({sent.dtype or sent.kind})")
    rows = [
        {"step: bundle": name} | {label: mib(sent[direction]) for direction, label in BYTE_DIRECTIONS.items()}
        for name, sent in sorted(totals.items(), key=lambda item: -item[1].total())
    ]
    return TextTable.of("MiB by step and bundle", rows)


def bytes_by(records: RunRecords, key: Callable[[Transfer], str]) -> dict[str, Counter[str]]:
    """Key of a transfer, such as its client -> direction -> bytes."""
    totals: dict[str, Counter[str]] = {}
    for transfer in records.transfers:
        totals.setdefault(key(transfer), Counter())[transfer.direction] += transfer.bytes
    return totals


def leakage_tables(records: RunRecords) -> list[TextTable]:
    """Tables that ``polyfed analyse leakage`` saved in the run; empty if it was not analysed.

    Raises:
        RunError: The file is damaged.
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
    """A row per client and cause; records of earlier versions have no causes."""
    # events are ordered by round, so the last of a client stays
    latest = {(event.cause, event.participant): event for event in events}
    times = Counter((event.cause, event.participant) for event in events)
    rows: list[dict[str, Cell]] = [
        {
            "client": event.participant,
            "cause": event.cause or None,
            "rounds": times[key],
            "last in round": str(event.round),
            "last reason": event.reason,
        }
        for key, event in sorted(latest.items(), key=lambda item: item[0][0])
    ]
    return TextTable.of(title, rows, drop_empty=True)


def incidents_table(records: RunRecords) -> TextTable:
    """One row per incident, the latest if there are too many."""
    events = sorted(records.events, key=lambda event: event.round)
    latest = events[-_MOST_INCIDENTS:]
    rows = [
        {"round": str(one.round), "participant": one.participant, "event": one.title, "reason": one.reason}
        for one in latest
    ]
    title = f"Events{'' if len(latest) == len(events) else f' (the last {len(latest):,} of {len(events):,})'}"
    return TextTable.of(title, rows)


# ---- one row per client


def clients_page_table(records: RunRecords) -> TextTable:
    """Task, data, metrics, bytes and exclusions of each client; columns without content are left out."""
    descriptions, excluded = client_descriptions(records), records.excluded()
    groups = {client: group for group, members in records.groups.items() for client in members}
    summary = RunSummary(records)
    results = {name: summary.of_clients(name, [name]) for name in records.clients}
    # groups with different tasks have different metrics: each gets a column, with dashes for the others
    mains = dict.fromkeys(one.known.metric for results_of in results.values() for one in results_of)
    measured = {name: max(records.series(name, main_metric(records, [name])), default=None) for name in records.clients}
    # steps of evaluation and setup have a colon in their names and are not answers
    answers = {(one.client, one.round) for one in records.transfers if one.direction == "up" and ":" not in one.step}
    rounds, sent = Counter(client for client, _ in answers), bytes_by(records, lambda one: one.client)
    rows: list[dict[str, Cell]] = []
    for name in records.clients:
        holding, last, events = records.holdings.get(name), records.last(name), _of(excluded, name)
        row: dict[str, Cell] = {"client": name, "group": groups.get(name, "")}
        row |= dict.fromkeys((*mains, "alone", "gain", "chance"))
        for one in results[name]:
            mine, alone = (one.alone, None) if summary.is_alone else (one.federated, one.alone)
            row |= {one.known.metric: mine.value if mine else None, "alone": alone.value if alone else None}
            row |= {"gain": one.gain if alone else None, "chance": one.known.chance}
        row |= {"loss": last.get("loss", math.nan)}
        # clients are measured in the rounds they take part in, so metrics in a row may be of different rounds
        row |= {"measured in": measured[name]} if len({*measured.values()}) > 1 else {}
        row |= {label: descriptions[name].get(label, "") for label in ("task", "modalities", "architecture")}
        row |= {label: getattr(holding, label, None) for label in ("items", "samples")}
        if records.transfers:
            own = sent.get(name, Counter())
            row |= {"rounds": rounds[name]}
            row |= {f"bytes {way}": byte_size(own[way]) if own[way] else "0" for way in ("up", "down")}
        if excluded:
            reason = f"round {events[-1].round}: {events[-1].reason}" if events else ""
            row |= {"excluded": len(events), "last reason": reason}
        rows.append(row)
    note = "Metrics are of each client's own last evaluation on its test samples, in percent where they have a maximum."
    if not any(results.values()):
        note = "Clients were not evaluated (run.evaluate_clients)."
    return TextTable.of("Clients", rows, (note,), drop_empty=True)


def _of(events: Sequence[Incident], participant: str) -> list[Incident]:
    return [event for event in events if event.participant == participant]


def client_descriptions(records: RunRecords) -> dict[str, dict[str, str]]:
    """Client id -> its ``task``, ``modalities`` and ``architecture``, as far as the configuration has them."""
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


# ---- partition


def partition_groups(holdings: Holdings) -> dict[str, dict[str, PartitionEntry]]:
    """Group -> its clients -> their holdings."""
    groups: dict[str, dict[str, PartitionEntry]] = {}
    for client, holding in holdings.items():
        groups.setdefault(holding.group, {})[client] = holding
    return groups


def sources_of(held: Holdings) -> list[str]:
    """Sources and splits of the clients' items; those held in addition are marked."""
    own = dict.fromkeys(f"{holding.source} {holding.split}".strip() for holding in held.values())
    also = [holding.also for holding in held.values() if holding.also]
    additional = dict.fromkeys(
        f"+ {each['source']} {each['split']}{', public' * bool(each['public'])}" for each in also
    )
    return [*filter(None, own), *additional]


def partition_tables(holdings: Holdings) -> list[TextTable]:
    """Sizes, items by value of the columns that make the class, and items by class, one client per column."""
    return [table for group, held in partition_groups(holdings).items() for table in _group_tables(group, held)]


def _group_tables(group: str, held: Holdings) -> Iterator[TextTable]:
    sizes: list[dict[str, Cell]] = [
        {
            "client": client,
            "items": holding.items,
            "samples": holding.samples,
            "test items": int(holding.test["items"]) if holding.test else None,
        }
        for client, holding in held.items()
    ]
    yield TextTable.of(f"{group}: sizes", sizes, tuple(_partition_notes(held)))
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
    """Counts with clients as columns, or as rows where they are many, and sums over clients or names."""
    names = short_names(list(next(iter(counts.values()))), held)
    # explicit columns, as a client or a class may have any name
    by_client = [(client, *(f"{n:,}" for n in (*row.values(), sum(row.values())))) for client, row in counts.items()]
    if len(counts) > _WIDEST:
        return TextTable(title, ["client", *names, "all"], by_client)
    of_all = [f"{sum(column):,}" for column in zip(*(row.values() for row in counts.values()), strict=True)]
    columns = [row[1:-1] for row in by_client]
    return TextTable(title, ["", *counts, "all"], list(zip(names, *columns, of_all, strict=True)))


def column_counts(held: Holdings) -> dict[str, dict[str, int]]:
    """Client -> column or value -> items: of a 0/1 column those with 1, else those with each value.

    Empty where the class is that of a single column.
    """
    values = _values_by_column(held)
    # the table by class shows a single column
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
    # class 10 follows class 9
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
    # items left out, or held in addition, are the same for all clients of a group
    first = next(iter(held.values()))
    if first.left_out:
        items = ", ".join(f"{number:,} without {column}" for column, number in first.left_out.items())
        yield f"Left out of '{first.source}' {first.split}: {items}."
    if missing := sum((Counter(holding.missing) for holding in held.values()), Counter[str]()):
        without = ", ".join(f"{number:,} without {name}" for name, number in sorted(missing.items()))
        yield f"Of the items of '{first.source}' {first.split}: {without}."
    if parts := [holding.also for holding in held.values() if holding.also]:
        sums = ", ".join(f"{sum(part[what] for part in parts):,} {what}" for what in ("items", "samples"))
        origin = f"{'the public set, ' if parts[0]['public'] else ''}'{parts[0]['source']}' {parts[0]['split']}"
        yield f"Counted above, but held in addition: {sums} of {origin}."


# ---- accounts of the data


def account_table(accounts: Mapping[str, Sequence[Mapping[str, Any]]]) -> TextTable:
    """Items found, read and left out of each source, with reasons.

    Args:
        accounts: Source -> counts, as ``Count.plain`` returns them.
    """
    rows: list[dict[str, Cell]] = [
        {
            "": f"{source}: {entry['unit']}",
            "found": int(entry["found"]),
            "read": int(entry["read"]),
            "left out": "; ".join(f"{number:,} {reason}" for reason, number in entry["left_out"].items()) or None,
        }
        for source, counts in accounts.items()
        for entry in counts
    ]
    return TextTable.of("What was read of the data", rows)


def recorded_accounts(folder: Path) -> list[TextTable]:
    """The table of a run folder; empty without a readable record of accounts."""
    try:
        return [account_table(file_json((folder / ACCOUNTS).read_bytes()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
