"""Who holds what as tables: items by class, and by value of the columns that make the class, one client a column."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from polyfed.reporting.tables import TextTable
from polyfed.runs.records import PartitionEntry

Held: TypeAlias = Mapping[str, PartitionEntry]

_WIDEST = 12  # columns; more clients than this stand one below the other
_BITS = {"0", "1"}


def groups_of(holdings: Held) -> dict[str, dict[str, PartitionEntry]]:
    """Group -> its clients -> what they hold."""
    groups: dict[str, dict[str, PartitionEntry]] = {}
    for client, holding in holdings.items():
        groups.setdefault(holding.group, {})[client] = holding
    return groups


def sources_of(held: Held) -> list[str]:
    """Sources and splits of what clients hold, that which they hold in addition marked as such."""
    own = dict.fromkeys(f"{holding.source} {holding.split}".strip() for holding in held.values())
    also = [holding.also for holding in held.values() if holding.also]
    additional = dict.fromkeys(
        f"+ {each['source']} {each['split']}{', public' * bool(each['public'])}" for each in also
    )
    return [*filter(None, own), *additional]


def partition_tables(holdings: Held) -> list[TextTable]:
    return [table for group, held in groups_of(holdings).items() for table in _group_tables(group, held)]


def column_counts(held: Held) -> dict[str, dict[str, int]]:
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


def classes_of(held: Held) -> list[str]:
    """Names of all classes that the clients hold: combinations of 0/1 columns as binary numbers, others sorted."""
    names = {name for holding in held.values() for name in holding.labels or ()}
    values = _values_by_column(held)
    # combinations are ordered like binary numbers: none, the first, the second, both
    bits = {column: 1 << place for place, column in enumerate(values)}
    if values and all(set(counted) <= _BITS for counted in values.values()):
        return sorted(names, key=lambda name: sum(bits.get(part, 0) for part in name.split("+")))
    return sorted(names, key=natural_order)


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts ``class 10`` after ``class 9``."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def short_names(names: list[str], held: Held) -> list[str]:
    """Names of classes or columns without the word that all columns begin with, such as ``mention_``."""
    columns = list(next(iter(held.values())).columns) if held else []
    heads = {column.partition("_")[0] if "_" in column else "" for column in columns}
    if len(columns) < 2 or len(heads) != 1 or "" in heads:
        return names
    return [name.replace(f"{min(heads)}_", "") for name in names]


def _group_tables(group: str, held: Held) -> Iterator[TextTable]:
    sizes = [
        (client, f"{holding.items:,}", f"{holding.samples:,}", f"{holding.test['items']:,}" if holding.test else "-")
        for client, holding in held.items()
    ]
    yield TextTable(f"{group}: sizes", ("client", "items", "samples", "test items"), sizes, _notes(held))
    counts = column_counts(held)
    if any(counts.values()):
        yield _matrix(f"{group}: items by column", held, counts)
    if any(holding.labels for holding in held.values()):
        names = classes_of(held)
        labels = {client: holding.labels or {} for client, holding in held.items()}
        yield _matrix(f"{group}: items by class", held, {c: {n: labels[c].get(n, 0) for n in names} for c in held})


def _values_by_column(held: Held) -> dict[str, dict[str, None]]:
    values: dict[str, dict[str, None]] = {}
    for holding in held.values():
        for column, counts in holding.columns.items():
            values.setdefault(column, {}).update(dict.fromkeys(counts))
    return values


def _notes(held: Held) -> tuple[str, ...]:
    # what is left out, or held in addition, is the same for all clients of a group
    first = next(iter(held.values()))
    notes = []
    if first.left_out:
        items = ", ".join(f"{number:,} without {column}" for column, number in first.left_out.items())
        notes.append(f"Left out of '{first.source}' {first.split}: {items}.")
    missing = sum((Counter(holding.missing) for holding in held.values()), Counter[str]())
    if missing:
        without = ", ".join(f"{number:,} without {name}" for name, number in sorted(missing.items()))
        notes.append(f"Of the items of '{first.source}' {first.split}: {without}.")
    notes += _held_in_addition(held)
    return tuple(notes)


def _held_in_addition(held: Held) -> list[str]:
    parts = [holding.also for holding in held.values() if holding.also]
    if not parts:
        return []
    sums = ", ".join(f"{sum(part[what] for part in parts):,} {what}" for what in ("items", "samples"))
    origin = f"{'the public set, ' if parts[0]['public'] else ''}'{parts[0]['source']}' {parts[0]['split']}"
    return [f"Counted above, but held in addition: {sums} of {origin}."]


def _matrix(title: str, held: Held, counts: Mapping[str, Mapping[str, int]]) -> TextTable:
    """Counts with clients as columns, or as rows where they are many, and the sum over clients or names."""
    names = list(next(iter(counts.values())))
    if len(counts) <= _WIDEST:
        columns, by_row = ("", *counts, "all"), [[client[name] for client in counts.values()] for name in names]
        headings = short_names(names, held)
    else:
        columns, by_row = ("client", *short_names(names, held), "all"), [list(row.values()) for row in counts.values()]
        headings = list(counts)
    rows = [(h, *(f"{n:,}" for n in (*row, sum(row)))) for h, row in zip(headings, by_row, strict=True)]
    return TextTable(title, columns, rows)
