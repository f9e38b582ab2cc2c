"""Text tables in a terminal of some width: wrapped, turned or split, so that no word is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from polyfed.core.untrusted import plain
from polyfed.reporting.tables import TextTable

_LONGEST_FIGURE = 32  # letters; longer cells are texts, which may be wrapped between words
_NARROWEST_LABEL = 20
_BETWEEN, _EDGES = 3, 2  # blanks that rich's box has between columns, and at both ends


@dataclass(frozen=True)
class FittedTable:
    """A table as wide as the terminal allows.

    Figures stay on one line and words stay whole. A table that is too wide wraps its labels and texts; else it is
    turned, or its columns stand in groups below each other.
    """

    table: TextTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(plain(self.table.title), style="bold")
        yield from _body(self.table, options.max_width) if self.table.rows else ()
        for note in self.table.notes:
            yield Text(plain(note), style="dim")
        if self.table.notes or not self.table.rows:  # below its last row a table has an empty line of its own
            yield Text()


def _body(table: TextTable, width: int) -> Iterator[Table]:
    may_turn = all(_is_figure(cell) for row in table.rows for cell in row)
    for shape in (table, table.turned()) if may_turn else (table,):
        if widths := _widths(shape, width):
            yield _drawn(shape, widths)
            return
    for part in column_groups(table, width):
        yield _drawn(part, _widths(part, width))


def column_groups(table: TextTable, width: int) -> list[TextTable]:
    """Groups of columns, each behind the labels; as few as there can be, and at least a column each."""
    groups: list[list[int]] = [[]]
    for place in range(1, len(table.columns)):
        if groups[-1] and not _widths(_part(table, [*groups[-1], place]), width):
            groups.append([])
        groups[-1].append(place)
    return [_part(table, group) for group in groups]


def _part(table: TextTable, places: Sequence[int]) -> TextTable:
    kept = (0, *places)
    return replace(
        table, columns=[table.columns[at] for at in kept], rows=[[row[at] for at in kept] for row in table.rows]
    )


# ---- widths


def _widths(table: TextTable, width: int) -> list[int]:
    """Of the columns; empty where the table does not fit."""
    columns = list(zip(table.columns, *table.rows, strict=True))
    needs = [_need(column, is_label=not place) for place, column in enumerate(columns)]
    wants = [max(len(plain(cell)) for cell in column) for column in columns]
    spare = width - _EDGES - _BETWEEN * (len(columns) - 1) - sum(needs)
    if spare < 0:
        return []
    while spare and needs != wants:  # the narrowest of those that are wrapped grows
        place = min((at for at in range(len(needs)) if needs[at] < wants[at]), key=needs.__getitem__)
        needs[place] += 1
        spare -= 1
    return needs


def _need(column: Sequence[str], *, is_label: bool) -> int:
    """Letters without which a figure or a word is cut."""
    whole = [len(plain(cell)) for cell in column[1:] if _is_figure(cell)]
    if is_label:  # sentences in few letters would be towers
        narrowest = _NARROWEST_LABEL if len(whole) == len(column) - 1 else _LONGEST_FIGURE
        whole = [min(narrowest, max(len(plain(cell)) for cell in column))]
    return max(*whole, *(len(word) for cell in column for word in plain(cell).split()), 0)


def _is_figure(cell: str) -> bool:
    return len(cell) <= _LONGEST_FIGURE


# ---- drawn


def _drawn(table: TextTable, widths: Sequence[int]) -> Table:
    """Where the terminal has too little room for even one column, without ``widths``, rich breaks words."""
    # names of clients, classes and metrics are others' words: never markup, never more than one line
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head, width, cells in zip_longest(table.columns, widths, zip(*table.rows, strict=True)):
        is_left = not drawn.columns or not all(map(_is_figure, cells))
        drawn.add_column(Text(plain(head)), justify="left" if is_left else "right", overflow="fold", width=width)
    for row in table.rows:
        drawn.add_row(*(Text(plain(cell)) for cell in row))
    return drawn
