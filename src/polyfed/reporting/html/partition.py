"""Who holds what: bars of classes by client, or a map where there are many clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np

from polyfed.reporting.html.bars import Segment, bar_table
from polyfed.reporting.html.cells import Cell, Column, data_table, folded
from polyfed.reporting.html.curves import group_colour, heading
from polyfed.reporting.html.heat_map import Frame, HeatMap
from polyfed.reporting.html.markup import Child, Markup, tag
from polyfed.reporting.partition_tables import classes_of, features, groups_of, sources_of
from polyfed.reporting.tables import count
from polyfed.runs.records import Holding, RunRecords

_MOST_BARS = 60
_MOST_CELLS = 20_000
_MOST_SWATCHES = 30
_MAP_COLUMNS = 200
_QUANTILES = {"smallest": 0.0, "lower quarter": 0.25, "median": 0.5, "upper quarter": 0.75, "largest": 1.0}


def partition(records: RunRecords) -> Markup:
    """Each group's clients; nothing if the run has not written its partition."""
    groups = groups_of(records.holdings)
    return Markup("".join(_group(group, held, group_colour(records, group)) for group, held in groups.items()))


def _group(group: str, held: Mapping[str, Holding], colour: int) -> Markup:
    classes = classes_of(held)
    named = sources_of(held)
    sources = ", ".join(named) if named else "held at its site"
    labelled = f"{len(classes)} classes" if classes else "no labels" if named else "samples alone are known"
    number = f"{len(held)} client{'s' if len(held) > 1 else ''}"
    content = _bars(group, held, classes, colour) if len(held) <= _MOST_BARS else _many(group, held, classes, colour)
    title = heading(f"{group}: {number}, {labelled} ({sources})")
    return tag("div", title, content, _table(group, held, classes), _by_column(group, held), class_="block")


def _bars(group: str, held: Mapping[str, Holding], classes: Sequence[str], colour: int) -> Markup:
    strengths = {name: 1.0 - 0.65 * place / max(1, len(classes) - 1) for place, name in enumerate(classes)}
    rows = {client: _parts(holding, classes, strengths, colour) for client, holding in held.items()}
    figures = {client: _amount(holding) for client, holding in held.items()}
    caption = f"Items of {group} clients{' by class' if classes else ''}"
    swatches = [
        tag("span", tag("span", class_=f"part c{colour}", style=f"--strength:{100 * strengths[n]:.0f}%"), n)
        for n in classes
        if len(classes) <= _MOST_SWATCHES
    ]
    return Markup(
        bar_table(caption, rows, figures, "client") + (tag("div", swatches, class_="swatches") if swatches else "")
    )


def _parts(holding: Holding, classes: Sequence[str], strengths: Mapping[str, float], colour: int) -> list[Segment]:
    also = holding.also["items"] if holding.also else 0
    more = [Segment(also, f"in addition, of {holding.also['source']}: {also:,}", colour, 0.2)] if holding.also else []
    if not holding.labels:
        return [Segment(holding.items - also, f"{holding.items - also:,} items", colour), *more]
    counts = holding.labels
    own = [
        Segment(counts[name], f"{name}: {counts[name]:,}", colour, strengths[name])
        for name in classes
        if name in counts
    ]
    return [*own, *more]


def _amount(holding: Holding) -> str:
    more = f" ({holding.samples:,} samples)" if holding.samples != holding.items else ""
    return f"{holding.items:,}{more}"


def _many(group: str, held: Mapping[str, Holding], classes: Sequence[str], colour: int) -> Markup:
    """How large the clients are, and a map of classes by clients where there are classes."""
    return Markup(_sizes(held, colour) + (_map(group, held, classes) if classes else ""))


def _sizes(held: Mapping[str, Holding], colour: int) -> Markup:
    sizes = np.array([holding.items for holding in held.values()])
    found = {name: float(np.quantile(sizes, share)) for name, share in _QUANTILES.items()}
    rows = {name: [Segment(size, count(size), colour)] for name, size in found.items()}
    return bar_table("Items of a client", rows, {name: count(size) for name, size in found.items()}, "client")


def _map(group: str, held: Mapping[str, Holding], classes: Sequence[str]) -> Markup:
    shown = classes[:_MAP_COLUMNS]
    counts = (holding.labels or {} for holding in held.values())
    values = np.array([[float(row.get(name, 0)) for name in shown] for row in counts])
    note = f"The first {len(shown)} of {len(classes)} classes." if len(shown) < len(classes) else ""
    title = f"Items of {len(held):,} {group} clients (rows) by class (columns)"
    return HeatMap(title, {0: Frame(list(held), values)}, "class", shown).drawn(note)


def _table(group: str, held: Mapping[str, Holding], classes: Sequence[str]) -> Markup:
    most = max(1, _MOST_CELLS // (3 + len(classes)))
    rows = [_row(client, holding, classes) for client, holding in islice(held.items(), most)]
    columns = [Column("client", numeric=False), Column("items"), Column("samples"), *(Column(name) for name in classes)]
    left_out = f" (the first {most:,} of {len(held):,} clients; all are in partition.json)" if most < len(held) else ""
    caption = (
        f"Partition of group {group}: items by class{left_out}" if classes else f"Partition of group {group}{left_out}"
    )
    return folded("Table", data_table(columns, rows, caption=caption))


def _by_column(group: str, held: Mapping[str, Holding]) -> Markup | None:
    """Items by value of the columns that make the class, where it is made of columns."""
    counts = features(held)
    names = list(next(iter(counts.values())))
    if not names:
        return None
    columns = [Column("client", numeric=False), Column("items"), *(Column(name) for name in names)]
    most = max(1, _MOST_CELLS // len(columns))
    rows: list[list[Cell | Child]] = [
        [client, f"{held[client].items:,}", *(f"{count:,}" for count in found.values())]
        for client, found in islice(counts.items(), most)
    ]
    return folded("Table by column", data_table(columns, rows, caption=f"Partition of group {group}: items by column"))


def _row(client: str, holding: Holding, classes: Sequence[str]) -> list[Cell | Child]:
    counts = holding.labels or {}
    return [client, f"{holding.items:,}", f"{holding.samples:,}", *(f"{counts.get(name, 0):,}" for name in classes)]
