"""Names of the files that answers are written to."""

from __future__ import annotations

from typing import Any

import pytest

from polyfed.lab.analysis.questions import QUESTIONS


@pytest.mark.parametrize(
    ("question", "options", "name"),
    [
        ("landscape", {"grid": 21, "model": "last"}, "landscape"),
        ("landscape", {"grid": 5, "model": "best"}, "landscape-grid5-modelbest"),
        ("centres", {"data": ["a", "b"]}, "centres-dataa,b"),
        ("leakage", {"passes": 7}, "leakage"),
    ],
)
def test_a_name_has_the_options_that_differ(question: str, options: dict[str, Any], name: str) -> None:
    assert QUESTIONS[question].stem(options) == name


def test_options_that_no_file_name_can_have_stand_there_as_digests() -> None:
    given = [{"data": [name]} for name in ("a/b", "a_b", "../a", "a\0", "ä", "CON:", "x" * 300)]
    given += [{"data": [f"d{number}" for number in range(count)]} for count in (99, 100)]
    names = [QUESTIONS["centres"].stem(options) for options in given]
    assert len(set(names)) == len(names)
    assert all(name.isascii() and "/" not in name and len(name) <= 150 for name in names)
