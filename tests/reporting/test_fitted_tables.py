"""Tables in 80 columns and fewer: figures and words are whole, whatever it takes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from polyfed.reporting.fitted_tables import FittedTable, column_groups
from polyfed.reporting.tables import TextTable

FIGURE = "50.38 ± 2.32 [79.02]"


def shown(table: TextTable, width: int = 80) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width).print(FittedTable(table))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    return lines


def table(rows: int, columns: int, cell: str = FIGURE) -> TextTable:
    heads = ("", *(f"column {at}" for at in range(columns)))
    return TextTable("A title", heads, [[f"row {at}", *[cell] * columns] for at in range(rows)], ("A note.",))


def test_labels_are_wrapped_between_words_before_anything_else() -> None:
    long = TextTable("t", ("", "a", "b"), [["creamfl without contrasts at 250 public pairs", FIGURE, FIGURE]])
    assert [line[:34].strip() for line in shown(long, 85)[4:6]] == ["creamfl without contrasts at 250", "public pairs"]


def test_a_table_with_more_columns_than_rows_is_turned() -> None:
    assert table(2, 3).turned() == TextTable(
        "A title", ("", "row 0", "row 1"), [[f"column {at}", FIGURE, FIGURE] for at in range(3)], ("A note.",)
    )
    lines = shown(table(2, 12))
    assert lines[2].split() == ["row", "0", "row", "1"]
    assert sum(FIGURE in line for line in lines) == 12


def test_one_that_fits_neither_way_is_split_by_columns() -> None:
    parts = column_groups(table(7, 10), 80)
    assert [len(part.columns) for part in parts] == [4, 4, 4, 2]
    lines = shown(table(7, 10))
    assert sum(line.count(FIGURE) for line in lines) == 70
    assert lines[-2:] == ["A note.", ""]


@pytest.mark.parametrize("width", [80, 60, 40, 24])
def test_no_figure_is_ever_cut(width: int) -> None:
    assert sum(line.count("12.34 ± 1") for line in shown(table(9, 9, "12.34 ± 1"), width)) == 81
