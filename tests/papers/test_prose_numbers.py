"""Numbers that prose states are read, and found in the records that it cites."""

from __future__ import annotations

import pytest
from test_study_records import record

from prose_numbers import Paragraph, unsupported


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("R@1 sum 9.4 untouched, 16.9 linear (+1.7 \u00b1 0.5)", ["9.4", "16.9", "+1.7", "0.5"]),
        ("falls by 3 points, 63 % of it, to -2", ["3", "63", "-2"]),
        ("25 clients, 1:20, 2.0.1, in `rate 0.002`, [there](a.md#at-1.5), Table 1", []),
        ("| a | **+3.0** | +2.2 to +3.8 |", ["+3.0", "+2.2", "+3.8"]),
    ],
)
def test_decimals_signs_percents_and_points_are_numbers(text: str, numbers: list[str]) -> None:
    assert Paragraph("docs/explanation/creamfl.md", text).numbers == numbers


@pytest.mark.parametrize(
    ("paper", "text", "left"),
    [
        ("creamfl", "Table 1: tiny has 12.00, prox 14.2 (+2.20), single seeds 10.0", []),  # means, differences
        ("creamfl", "Table 1: prox is above by 2.2, and below by -2.2", []),  # an unsigned number is a size
        ("creamfl", "Table 1: prox is above by +2.3, p 0.77", ["+2.3", "0.77"]),
        ("creamfl", "Table 2: tiny has 12.00", ["12.00"]),  # which was not run
        ("creamfl", "tiny has 12.00", []),  # some study of the paper
        ("fedaid", "12.00", ["12.00"]),  # another paper's
    ],
)
def test_a_number_stands_in_a_record_of_the_studies_that_are_named(paper: str, text: str, left: list[str]) -> None:
    assert unsupported(Paragraph(f"docs/explanation/{paper}.md", text), [record()]) == left
