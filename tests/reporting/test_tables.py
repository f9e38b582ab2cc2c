from __future__ import annotations

import math

import pytest
from rich.console import Console

from polyfed.reporting.fitted_tables import FittedTable
from polyfed.reporting.tables import TextTable, count, duration, figure, mib

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
    assert [figure(1234.567), figure(0.5, 3), figure(math.nan)] == ["1,234.57", "0.500", "-"]
    assert [count(5000.0), count(2.5), count(math.nan)] == ["5,000", "2.5", "-"]
    assert mib(3 * 2**20) == "3.00"
