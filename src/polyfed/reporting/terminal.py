"""The terminal for tables, bars and reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from polyfed.core.untrusted import plain
from polyfed.reporting.tables import TextTable

_LONGEST_NUMBER = 32  # letters; longer cells are texts, which may be wrapped between words
_NARROWEST_LABEL = 16
_BETWEEN, _EDGES = 3, 2  # blanks that rich's box has between columns, and at both ends


class Terminal(Console):
    """A console on which shown text cannot act as control codes; colours and bars are rich's own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of text and style; control codes are segments of their own, and come from rich alone."""
        for segment in super().render(renderable, options):
            # line breaks are rich's; other control characters in a text are foreign
            harmless = segment.control or segment.text.isprintable()
            yield segment if harmless else Segment("\n".join(map(plain, segment.text.split("\n"))), segment.style)

    def print_tables(self, tables: Iterable[TextTable]) -> None:
        for table in tables:
            self.print(FittedTable(table))


@dataclass(frozen=True)
class FittedTable:
    """A table as wide as the terminal allows.

    Numbers stay on one line and words stay whole. A table that is too wide wraps its labels and texts; else it is
    turned, or its columns stand in groups below each other.
    """

    table: TextTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from [Text(plain(self.table.title), style="bold")] * bool(self.table.title)
        yield from _fitted(self.table, options.max_width) if self.table.rows else ()
        for note in self.table.notes:
            yield Text(plain(note), style="dim")
        if self.table.notes or not self.table.rows:  # below its last row a table has an empty line of its own
            yield Text()


def _fitted(table: TextTable, width: int) -> Iterator[Table]:
    may_turn = all(len(cell) <= _LONGEST_NUMBER for row in table.rows for cell in row)
    for shape in (table, table.turned()) if may_turn else (table,):
        if widths := _widths(shape, width):
            yield _drawn(shape, widths)
            return
    for part in column_groups(table, width):
        yield _drawn(part, _widths(part, width))


def column_groups(table: TextTable, width: int) -> list[TextTable]:
    """Groups of columns, each behind the labels: as few as possible, of at least one column each."""
    groups: list[list[int]] = [[]]
    for index in range(1, len(table.columns)):
        if groups[-1] and not _widths(_columns(table, [*groups[-1], index]), width):
            groups.append([])
        groups[-1].append(index)
    return [_columns(table, group) for group in groups]


def _columns(table: TextTable, indices: Sequence[int]) -> TextTable:
    columns, *rows = ([row[index] for index in (0, *indices)] for row in (table.columns, *table.rows))
    return replace(table, columns=columns, rows=rows)


def _widths(table: TextTable, width: int) -> list[int]:
    """Widths of the columns; empty where the table does not fit."""
    columns = [list(map(plain, column)) for column in zip(table.columns, *table.rows, strict=True)]
    widths = [_narrowest(column, is_label=not index) for index, column in enumerate(columns)]
    widest = [max(map(len, column)) for column in columns]
    if (spare := width - _EDGES - _BETWEEN * (len(columns) - 1) - sum(widths)) < 0:
        return []
    while spare and widths != widest:  # the narrowest of those that are wrapped grows
        grows = min((index for index in range(len(widths)) if widths[index] < widest[index]), key=widths.__getitem__)
        widths[grows] += 1
        spare -= 1
    return widths


def _narrowest(column: Sequence[str], *, is_label: bool) -> int:
    """Width below which a number or a word would be cut."""
    numbers = [len(cell) for cell in column[1:] if len(cell) <= _LONGEST_NUMBER]
    if is_label:  # narrow sentences would become towers
        least = _NARROWEST_LABEL if len(numbers) == len(column) - 1 else _LONGEST_NUMBER
        numbers = [min(least, max(map(len, column)))]
    return max(*numbers, *(len(word) for cell in column for word in cell.split()), 0)


def _drawn(table: TextTable, widths: Sequence[int]) -> Table:
    """Table of rich; without ``widths``, where not even one column fits, rich breaks words."""
    # names of clients, classes and metrics are foreign text: never markup, never more than one line
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head, width, cells in zip_longest(table.columns, widths, zip(*table.rows, strict=True)):
        is_left = not drawn.columns or any(len(cell) > _LONGEST_NUMBER for cell in cells)
        drawn.add_column(Text(plain(head)), justify="left" if is_left else "right", overflow="fold", width=width)
    for row in table.rows:
        drawn.add_row(*(Text(plain(cell)) for cell in row))
    return drawn
