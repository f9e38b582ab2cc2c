"""Tables of a page: for people, and for a script that sorts and filters them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from polyfed.reporting.charts import RoundChart
from polyfed.reporting.partition_tables import Held, classes_of, column_counts
from polyfed.reporting.tables import TextTable, figure

_MOST_ROWS = 200
_MOST_CELLS = 20_000


@dataclass(frozen=True)
class TableCell:
    """A cell of a table.

    Attributes:
        shown: its text.
        number: what it is sorted by; None: by its text; NaN: always last.
        dot: colour of a dot before the text, 0 for none.
        pill: mood of the text as a label: ``good``, ``bad`` or ``odd``; none if empty.
    """

    shown: str
    number: float | None = None
    dot: int = 0
    pill: str = ""

    @property
    def key(self) -> str | None:
        return None if self.number is None else "" if math.isnan(self.number) else f"{self.number:.10g}"

    def __bool__(self) -> bool:
        return bool(self.shown) and not (self.number is not None and math.isnan(self.number))


@dataclass(frozen=True)
class TableColumn:
    """A heading; ``numeric`` columns are set to the right, ``hint`` explains the heading."""

    label: str
    numeric: bool = True
    hint: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table in a box that scrolls sideways; the first cell of a row is its heading.

    Attributes:
        caption: what the table shows.
        columns: headings.
        rows: cells, as many as there are headings.
        id: id of the table, if any.
        sortable: headings become buttons that sort.
        participants: for each row whom it is about, to filter by; none if empty.
        notes: sentences that stand below.
    """

    caption: str
    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[TableCell]]
    id: str = ""
    sortable: bool = False
    participants: Sequence[str] = ()
    notes: Sequence[str] = ()


def number_cell(value: float | None, digits: int = 2) -> TableCell:
    if value is None or not math.isfinite(value):
        return TableCell("–", math.nan)
    return TableCell(figure(value, digits), value)


def count_cell(number: int | None) -> TableCell:
    return number_cell(None) if number is None else TableCell(f"{number:,}", number)


def plain_table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: bool = True,
    notes: Sequence[str] = (),
) -> PageTable:
    """Finished texts; all columns but the first are figures, if any are."""
    headings = [TableColumn(label, numeric=numeric and place > 0) for place, label in enumerate(columns)]
    return PageTable(caption, headings, [[TableCell(text) for text in row] for row in rows], notes=notes)


def page_tables(tables: Iterable[TextTable]) -> list[PageTable]:
    return [plain_table(table.title, table.columns, table.rows, notes=table.notes) for table in tables if table.rows]


def chart_values(chart: RoundChart) -> PageTable:
    """The values of a chart, of a long run those of every so many rounds."""
    step = -(-len(chart.rounds) // _MOST_ROWS)
    lines = [line for line in chart.lines if line.listed]
    rows = [
        [TableCell(str(number)), *(number_cell(line.values.get(number)) for line in lines)]
        # the last round is what everything else on the page is about
        for number in sorted({*chart.rounds[::step], chart.rounds[-1]})
    ]
    columns = [TableColumn("round"), *(TableColumn(line.label) for line in lines)]
    return PageTable(f"{chart.title}, {chart.unit}{f' (every {step} rounds)' if step > 1 else ''}", columns, rows)


def holdings_table(group: str, held: Held) -> PageTable:
    """What each client of a group holds, by class where there are classes."""
    classes = classes_of(held)
    # a hundred classes of a thousand clients would be most of the page
    most = max(1, _MOST_CELLS // (3 + len(classes)))
    rows = [
        [client, f"{holding.items:,}", f"{holding.samples:,}", *_counts(holding.labels or {}, classes)]
        for client, holding in islice(held.items(), most)
    ]
    left_out = f" (the first {most:,} of {len(held):,} clients; all are in partition.json)" if most < len(held) else ""
    caption = f"Partition of group {group}{': items by class' if classes else ''}{left_out}"
    return plain_table(caption, ["client", "items", "samples", *classes], rows)


def columns_table(group: str, held: Held) -> PageTable | None:
    """Items by value of the columns that make the class; None where it is not made of columns."""
    counts = column_counts(held)
    names = list(next(iter(counts.values())))
    if not names:
        return None
    most = max(1, _MOST_CELLS // (2 + len(names)))
    rows = [[c, f"{held[c].items:,}", *_counts(numbers, names)] for c, numbers in islice(counts.items(), most)]
    return plain_table(f"Partition of group {group}: items by column", ["client", "items", *names], rows)


def _counts(numbers: Mapping[str, int], names: Sequence[str]) -> list[str]:
    return [f"{numbers.get(name, 0):,}" for name in names]
