"""Who holds what as tables: items by class, and by value of the columns that make the class, one client a column."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from polyfed.reporting.tables import TextTable
from polyfed.runs.records import Holding

Held = Mapping[str, Holding]
Counts = Mapping[str, Mapping[str, int]]

_WIDEST = 12  # columns; more clients than this stand one below the other
_BITS = ("0", "1")


def groups_of(holdings: Held) -> dict[str, dict[str, Holding]]:
    """Group -> its clients -> what they hold."""
    groups: dict[str, dict[str, Holding]] = {}
    for client, holding in holdings.items():
        groups.setdefault(holding.group, {})[client] = holding
    return groups


def sources_of(held: Held) -> list[str]:
    """Sources and splits of what clients hold, that which they hold in addition marked as such."""
    own = dict.fromkeys(f"{holding.source} {holding.split}".strip() for holding in held.values())
    also = [holding.also for holding in held.values() if holding.also]
    more = dict.fromkeys(f"+ {each['source']} {each['split']}{', public' * bool(each['public'])}" for each in also)
    return [*filter(None, own), *more]


def partition_tables(holdings: Held) -> list[TextTable]:
    """For each group its sizes, its items by column where the class is made of columns, and by class."""
    return [table for group, held in groups_of(holdings).items() for table in _of_group(group, held)]


def features(held: Held) -> dict[str, dict[str, int]]:
    """Client -> what is counted of the columns -> items: of a 0/1 column those with 1, else those with each value.

    Nothing where the class is that of a single column.
    """
    values = _values_of(held)
    if len(values) < 2:
        return {client: {} for client in held}
    return {
        client: {
            name: holding.columns.get(column, {}).get(value, 0)
            for column, found in values.items()
            for name, value in _features_of(column, found)
        }
        for client, holding in held.items()
    }


def classes_of(held: Held) -> list[str]:
    """Names of all classes that the clients hold: combinations of 0/1 columns as binary numbers, others sorted."""
    names = {name for holding in held.values() for name in holding.labels or ()}
    values = _values_of(held)
    place = {name: bit for bit, name in enumerate(values)}
    if values and all(set(found) <= set(_BITS) for found in values.values()):
        return sorted(names, key=lambda name: sum(1 << place[part] for part in name.split("+") if part in place))
    return sorted(names, key=natural)


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts ``class 10`` after ``class 9``."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def short_names(names: Sequence[str], held: Held) -> list[str]:
    """Names of classes or columns without the word that all columns begin with, such as ``mention_``."""
    columns = list(next(iter(held.values())).columns) if held else []
    heads = {column.partition("_")[0] if "_" in column else "" for column in columns}
    shared = f"{heads.pop()}_" if len(heads) == 1 < len(columns) else "_"
    return [name.replace(shared, "") if shared != "_" else name for name in names]


def _of_group(group: str, held: Held) -> Iterator[TextTable]:
    yield TextTable(f"{group}: sizes", ("client", "items", "samples", "test items"), _sizes(held), _notes(held))
    counts = features(held)
    if any(counts.values()):
        yield _matrix(f"{group}: items by column", held, counts)
    if any(holding.labels for holding in held.values()):
        yield _matrix(f"{group}: items by class", held, _by_class(held))


def _values_of(held: Held) -> dict[str, list[str]]:
    """Column -> names of its values, as far as any client has counted them."""
    values: dict[str, dict[str, None]] = {}
    for holding in held.values():
        for column, counts in holding.columns.items():
            values.setdefault(column, {}).update(dict.fromkeys(counts))
    return {column: list(found) for column, found in values.items()}


def _by_class(held: Held) -> dict[str, dict[str, int]]:
    names = classes_of(held)
    return {client: {name: (holding.labels or {}).get(name, 0) for name in names} for client, holding in held.items()}


def _features_of(column: str, values: Sequence[str]) -> list[tuple[str, str]]:
    """Name and value of what is counted of a column."""
    if set(values) <= set(_BITS):
        return [(column, "1")]
    return [(f"{column} {value}", value) for value in values]


def _sizes(held: Held) -> list[tuple[str, ...]]:
    return [
        (client, f"{holding.items:,}", f"{holding.samples:,}", f"{holding.test['items']:,}" if holding.test else "-")
        for client, holding in held.items()
    ]


def _notes(held: Held) -> tuple[str, ...]:
    found = next(iter(held.values()))
    items = ", ".join(f"{number:,} without {column}" for column, number in found.left_out.items())
    left_out = (f"Left out of '{found.source}' {found.split}: {items}.",) if items else ()
    if found.also is None:
        return left_out
    of = "the public set, " if found.also["public"] else ""
    parts = [holding.also for holding in held.values() if holding.also is not None]
    sums = [f"{sum(part[what] for part in parts):,} {what}" for what in ("items", "samples")]
    second = f"{of}'{found.also['source']}' {found.also['split']}"
    return (*left_out, f"Counted above, but held in addition: {', '.join(sums)} of {second}.")


def _matrix(title: str, held: Held, counts: Counts) -> TextTable:
    """Counts with clients as columns, or as rows where they are many, and the sum over clients."""
    clients = list(counts)
    names = list(next(iter(counts.values())))
    shown = short_names(names, held)
    if len(clients) <= _WIDEST:
        rows = [(label, *_cells([counts[c][name] for c in clients])) for label, name in zip(shown, names, strict=True)]
        return TextTable(title, ("", *clients, "all"), rows)
    body = [(client, *_cells([counts[client][name] for name in names])) for client in clients]
    return TextTable(title, ("client", *shown, "all"), body)


def _cells(numbers: Sequence[int]) -> list[str]:
    return [f"{number:,}" for number in (*numbers, sum(numbers))]
