"""Small text tables, for a terminal and for a file (Markdown), and the formats of figures in them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from polyfed.core.untrusted import markdown

MIB = 2**20
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MOST = 20  # columns of a page


@dataclass(frozen=True)
class TextTable:
    """A titled table of finished cells; the first column is a label, the others are numbers.

    Attributes:
        title: one line.
        columns: headings.
        rows: cells, as many a row as there are headings.
        notes: sentences that stand below.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default=())

    def turned(self) -> TextTable:
        """Rows as columns."""
        corner, *heads = self.columns
        body = [[head, *(row[index] for row in self.rows)] for index, head in enumerate(heads, 1)]
        return replace(self, columns=(corner, *(row[0] for row in self.rows)), rows=body)

    def markdown(self, level: int = 2) -> str:
        """For a file; ``level`` is that of the heading. What has more columns than a page shows is turned."""
        if self.rows and len(self.columns) > max(_MOST, len(self.rows)):
            return self.turned().markdown(level)
        names, *rows = ([markdown(cell) for cell in row] for row in (self.columns, *self.rows))
        ruler = ["---", *["---:"] * (len(self.columns) - 1)]
        body = [f"| {' | '.join(row)} |" for row in (names, ruler, *rows)] if rows else []
        parts = [f"{'#' * level} {markdown(self.title)}", "\n".join(body), *map(markdown, self.notes)]
        return "\n\n".join(part for part in parts if part) + "\n"


def format_number(value: float, digits: int = 2) -> str:
    """A rounded number; a dash where there is none."""
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def count(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def span_of(numbers: Collection[int]) -> str:
    """``3``, ``2 to 5``, or a dash where there is none."""
    if not numbers:
        return "-"
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def mib(number: float) -> str:
    return f"{number / MIB:,.2f}"


def duration(seconds: float) -> str:
    """Seconds for people: ``0.42 s``, ``12 s``, ``3:05``, ``2:03:05``."""
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
