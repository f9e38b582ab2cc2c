"""Tables: of files, and in 80 columns and fewer, where figures and words are whole, whatever it takes."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from polyfed.reporting.tables import TextTable, count, duration, format_number, mib
from polyfed.reporting.terminal import FittedTable, column_groups

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
    assert [len(part.columns) for part in column_groups(table(7, 10), 80)] == [4, 4, 4, 2]
    lines = shown(table(7, 10))
    assert sum(line.count(FIGURE) for line in lines) == 70
    assert lines[-2:] == ["A note.", ""]


@pytest.mark.parametrize("width", [80, 60, 40, 24])
def test_no_figure_is_ever_cut(width: int) -> None:
    assert sum(line.count("12.34 ± 1") for line in shown(table(9, 9, "12.34 ± 1"), width)) == 81


TABLE = TextTable("Title", ("name", "value"), [("a|b [red]", "1"), ("c", "2")], ("A note.",))


def test_markdown():
    assert TABLE.markdown() == (
        "## Title\n\n| name | value |\n| --- | ---: |\n| a\\|b \\[red] | 1 |\n| c | 2 |\n\nA note.\n"
    )


def test_what_is_wider_than_a_page_stands_upright_in_a_file():
    wide = TextTable("T", ("", *map(str, range(30))), [("row", *map(str, range(100, 130)))])
    assert wide.markdown().splitlines()[2:6] == ["|  | row |", "| --- | ---: |", "| 0 | 100 |", "| 1 | 101 |"]


def test_rich_shows_all_cells_literally():
    console = Console(width=60, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(FittedTable(TABLE))
    text = console.export_text()
    for cell in ("Title", "name", "value", "a|b [red]", "A note."):
        assert cell in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.424, "0.42 s"), (12.3, "12 s"), (60, "1:00"), (185.4, "3:05"), (7385, "2:03:05"), (59.7, "1:00")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_figures():
    assert [format_number(1234.567), format_number(0.5, 3), format_number(math.nan)] == ["1,234.57", "0.500", "-"]
    assert [count(5000.0), count(2.5), count(math.nan)] == ["5,000", "2.5", "-"]
    assert mib(3 * 2**20) == "3.00"
