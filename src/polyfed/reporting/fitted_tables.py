"""Text tables in a terminal of some width: wrapped, turned, stacked or split, so that no word is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from polyfed.core.untrusted import plain

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table
    from rich.text import Text

    from polyfed.reporting.tables import TextTable

_LONGEST_FIGURE = 32  # letters; longer cells are texts, which may be wrapped between words
_NARROWEST_LABEL = 20
_BETWEEN, _EDGES = 3, 2  # blanks that rich's box has between columns, and at both ends


@dataclass(frozen=True)
class FittedTable:
    """A table as wide as the terminal allows.

    Figures stay on one line and words stay whole. A table that is too wide wraps its labels and texts; else it is
    turned, or its labels stand on lines of their own, or its columns stand in groups below each other.
    """

    table: TextTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(plain(self.table.title), style="bold")
        yield from _body(self.table, options.max_width) if self.table.rows else ()
        for note in self.table.notes:
            yield Text(plain(note), style="dim")
        if self.table.notes or not self.table.rows:  # below its last row a table has an empty line of its own
            yield Text()


def _body(table: TextTable, width: int) -> Iterator[Table | Text]:
    may_turn = all(_is_figure(cell) for row in table.rows for cell in row)
    for shape in (table, table.turned()) if may_turn else (table,):
        if widths := _widths(shape, width):
            yield _drawn(shape, widths)
            return
    if _is_stackable(table, width):
        yield from _stacked(table)
        return
    for part in column_groups(table, width):
        yield _drawn(part, _widths(part, width) or _squeezed(part, width))


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
    wants = [max(map(_length, column)) for column in columns]
    spare = _inside(width, len(columns)) - sum(needs)
    if spare < 0:
        return []
    while spare and needs != wants:  # the narrowest of those that are wrapped grows
        place = min((at for at in range(len(needs)) if needs[at] < wants[at]), key=needs.__getitem__)
        needs[place] += 1
        spare -= 1
    return needs


def _inside(width: int, columns: int) -> int:
    return width - _EDGES - _BETWEEN * (columns - 1)


def _need(column: Sequence[str], *, is_label: bool) -> int:
    head, *cells = column
    whole = [_length(cell) for cell in cells if _is_figure(cell)]
    if is_label:  # sentences in few letters would be towers
        narrowest = _NARROWEST_LABEL if len(whole) == len(cells) else _LONGEST_FIGURE
        whole = [min(narrowest, max(map(_length, column)))]
    return max(_longest_word(head), *whole, *map(_longest_word, cells))


def _is_figure(cell: str) -> bool:
    return len(cell) <= _LONGEST_FIGURE


def _length(cell: str) -> int:
    return len(plain(cell))


def _longest_word(cell: str) -> int:
    return max(map(len, plain(cell).split()), default=0)


def _squeezed(table: TextTable, width: int) -> list[int]:
    """Of a table of two columns in a terminal too narrow for both: the figures' as they are if there is room at all."""
    inside = _inside(width, 2)
    figures = min(_need((table.columns[1], *(row[1] for row in table.rows)), is_label=False), 2 * inside // 3)
    return [inside - figures, figures]


# ---- drawn


def _drawn(table: TextTable, widths: Sequence[int]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    # names of clients, classes and metrics are others' words: never markup, never more than one line
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head, width, cells in zip(table.columns, widths, zip(*table.rows, strict=True), strict=True):
        is_left = not drawn.columns or not all(map(_is_figure, cells))
        drawn.add_column(Text(plain(head)), justify="left" if is_left else "right", overflow="fold", width=width)
    for row in table.rows:
        drawn.add_row(*(Text(plain(cell)) for cell in row))
    return drawn


def _is_stackable(table: TextTable, width: int) -> bool:
    cells = [cell for row in table.rows for cell in row[1:]]
    return all(map(_is_figure, cells)) and sum(_stacked_widths(table)) + _BETWEEN * len(table.columns) <= width


def _stacked_widths(table: TextTable) -> list[int]:
    return [
        max(map(_length, column)) for column in zip(table.columns[1:], *(row[1:] for row in table.rows), strict=True)
    ]


def _stacked(table: TextTable) -> Iterator[Text]:
    """Every label on a line of its own, its figures below."""
    from rich.text import Text

    def line(cells: Sequence[str], style: str = "") -> Text:
        padded = (plain(cell).rjust(width) for cell, width in zip(cells, _stacked_widths(table), strict=True))
        return Text(" " * _BETWEEN + (" " * _BETWEEN).join(padded), style=style)

    yield Text()
    yield line(table.columns[1:], "bold")
    for label, *cells in table.rows:
        yield Text(plain(label))
        yield line(cells)
    yield Text()
