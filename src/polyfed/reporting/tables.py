"""Tables of finished cells, shown by a terminal, a page and Markdown files alike, and the formats of their figures."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from polyfed.core.untrusted import markdown

MIB = 2**20
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MOST = 20  # columns of a page

Cell = str | int | float | None
"""A text; a whole number; another number, shown with two decimals; None for a missing value."""


@dataclass(frozen=True)
class TextTable:
    """A titled table of finished cells; the first column is a label, the others are numbers.

    ``Terminal`` prints it, ``markdown`` is for files, and the template ``parts.html.j2`` for pages.

    Attributes:
        title: One line.
        columns: Headings.
        rows: Cells, as many per row as there are headings.
        notes: Sentences below.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default=())

    @classmethod
    def of(
        cls, title: str, rows: Iterable[Mapping[str, Cell]], notes: Sequence[str] = (), *, drop_empty: bool = False
    ) -> TextTable:
        """Table of rows that map headings to cells, headings in order of appearance.

        >>> TextTable.of("t", [{"client": "a", "items": 1200, "loss": 0.5}, {"client": "b", "loss": None}]).rows
        [('a', '1,200', '0.50'), ('b', '-', '-')]

        Args:
            title: One line.
            rows: Heading -> cell of each row.
            notes: Sentences below.
            drop_empty: True to leave out headings under which no row has a value.
        """
        known = [{head: cell_text(cell) for head, cell in row.items()} for row in rows]
        filled = {head for row in known for head, text in row.items() if text not in ("", "-")}
        columns = [head for head in dict.fromkeys(chain.from_iterable(known)) if head in filled or not drop_empty]
        return cls(title, columns, [tuple(row.get(head, "-") for head in columns) for row in known], notes)

    def turned(self) -> TextTable:
        """Table with rows as columns."""
        corner, *heads = self.columns
        body = [[head, *(row[index] for row in self.rows)] for index, head in enumerate(heads, 1)]
        return replace(self, columns=(corner, *(row[0] for row in self.rows)), rows=body)

    def markdown(self, level: int = 2) -> str:
        """Markdown with a heading of that level; a table of more columns than a page shows is turned."""
        if self.rows and len(self.columns) > max(_MOST, len(self.rows)):
            return self.turned().markdown(level)
        names, *rows = ([markdown(cell) for cell in row] for row in (self.columns, *self.rows))
        ruler = ["---", *["---:"] * (len(self.columns) - 1)]
        body = [f"| {' | '.join(row)} |" for row in (names, ruler, *rows)] if rows else []
        parts = [f"{'#' * level} {markdown(self.title)}", "\n".join(body), *map(markdown, self.notes)]
        return "\n\n".join(part for part in parts if part) + "\n"


def cell_text(cell: Cell) -> str:
    """Text of a cell, a dash for none."""
    if isinstance(cell, int):
        return f"{cell:,}"
    return cell if isinstance(cell, str) else "-" if cell is None else format_number(cell)


def format_number(value: float, digits: int = 2) -> str:
    """A rounded number, a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def count(value: float) -> str:
    """A whole number, or a mean of such with one decimal; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def span_of(numbers: Collection[int]) -> str:
    """``3``, ``2 to 5``, or a dash for no number."""
    if not numbers:
        return "-"
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def mib(number: float) -> str:
    return f"{number / MIB:,.2f}"


def duration(seconds: float) -> str:
    """Seconds in human-readable form: ``0.42 s``, ``12 s``, ``3:05``, ``2:03:05``."""
    if round(seconds) < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes}:{remainder:02d}"


def byte_size(number: float) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    power = 0
    while number >= 1024 and power < len(_UNITS) - 1:
        number, power = number / 1024, power + 1
    return f"{number:,.{min(power, 1)}f} {_UNITS[power]}"
