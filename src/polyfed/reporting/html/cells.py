"""Tables for people and for scripts that sort them, and figures as they are written in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from polyfed.reporting.html.markup import Child, Markup, tag
from polyfed.reporting.tables import TextTable, figure

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and the number that it is sorted by (None: by its text)."""

    shown: Child
    number: float | None = None


@dataclass(frozen=True)
class Column:
    """A heading; ``numeric`` columns are set to the right, ``hint`` explains the heading."""

    label: str
    numeric: bool = True
    hint: str = ""


def size(number: float) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    power = 0
    while number >= 1024 and power < len(_UNITS) - 1:
        number, power = number / 1024, power + 1
    return f"{number:,.{min(power, 1)}f} {_UNITS[power]}"


def size_cell(number: float) -> Cell:
    """Bytes, sorted by their number."""
    return Cell(size(number) if number else "0", number)


def number_cell(value: float | None, digits: int = 2) -> Cell:
    """A figure, or a dash that is sorted last."""
    known = value is not None and math.isfinite(value)
    return Cell(figure(value, digits), value) if value is not None and known else Cell("–", math.nan)


def data_table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell | Child]],
    *,
    caption: str,
    id_: str | None = None,
    sortable: bool = False,
    filters: Sequence[Mapping[str, str]] = (),
) -> Markup:
    """A table in a box that scrolls sideways; the first cell of a row is its heading.

    Args:
        columns: headings.
        rows: cells, as many as there are headings.
        caption: what the table shows.
        id_: id of the table.
        sortable: headings become buttons that sort.
        filters: for each row, ``data-`` attributes that a script filters by; none if empty.
    """
    head = tag("thead", tag("tr", [_heading(column, sortable) for column in columns]))
    body = [
        tag(
            "tr",
            [
                _cell(cell, column, first=not place)
                for place, (cell, column) in enumerate(zip(row, columns, strict=True))
            ],
            **(filters[number] if filters else {}),
        )
        for number, row in enumerate(rows)
    ]
    table = tag(
        "table",
        tag("caption", tag("span", caption)),
        head,
        tag("tbody", body),
        id=id_,
        class_="sortable" if sortable else None,
    )
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def text_table(table: TextTable) -> Markup:
    """One of the tables that the text report shows, with its notes."""
    columns = [Column(label, numeric=place > 0) for place, label in enumerate(table.columns)]
    notes = [tag("p", note, class_="note") for note in table.notes]
    return tag("div", data_table(columns, table.rows, caption=table.title), notes, class_="block")


def folded(summary: str, *children: Child, id_: str | None = None) -> Markup:
    """Content behind a line that opens it."""
    return tag("details", tag("summary", summary), children, id=id_)


def _heading(column: Column, sortable: bool) -> Markup:
    label = tag("button", column.label, type="button", title=column.hint or None) if sortable else column.label
    return tag(
        "th",
        label,
        scope="col",
        class_="number" if column.numeric else None,
        aria_sort="none" if sortable else None,
        title=column.hint or None if not sortable else None,
    )


def _cell(cell: Cell | Child, column: Column, *, first: bool) -> Markup:
    whole = cell if isinstance(cell, Cell) else Cell(cell)
    key = None if whole.number is None else "" if math.isnan(whole.number) else f"{whole.number:.10g}"
    classes = "number" if column.numeric else None
    if first:
        return tag("th", whole.shown, scope="row", data_key=key, class_=classes)
    return tag("td", whole.shown, data_key=key, class_=classes)
