"""Rows below the row of clients that train alone are named beside the tables."""

from __future__ import annotations

import pytest

from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from polyfed.lab.studies.tables import figure_tables
from small_federations import tiny_experiment


def notes(rows: dict[str, list[float]], *, lower: bool = False) -> list[str]:
    study = Study.model_validate(
        {
            "title": "t",
            "base": tiny_experiment(),
            "rows": {name: {} for name in rows},
            "columns": {"x": {"metric": "r1_sum", "lower": lower}, "MiB": {"name": "traffic"}},
        }
    )
    values = {(name, (), "x"): dict(enumerate(by_seed)) for name, by_seed in rows.items()}
    (table,) = figure_tables(Results(study, values))
    return [note for note in table.notes if "alone" in note]


@pytest.mark.parametrize(
    ("rows", "lower", "expected"),
    [
        (
            {"a": [1.0, 1.1, 0.9], "b": [3.0, 1.0, 2.0], "local": [2.0, 2.0, 2.0]},
            False,
            "below training alone (local): a.",
        ),
        ({"a": [3.0], "b": [1.0], "local": [2.0]}, False, "below training alone (local): b."),
        ({"a": [3.0], "b": [1.0], "local": [2.0]}, True, "below training alone (local): a."),
        ({"a": [3.0], "local": [2.0]}, False, "nothing is below training alone (local)."),
    ],
)
def test_rows_below_training_alone_are_named(rows: dict[str, list[float]], lower: bool, expected: str) -> None:
    assert notes(rows, lower=lower) == [f"x: {expected}"]


def test_without_such_a_row_nothing_is_said() -> None:
    assert notes({"a": [1.0], "b": [2.0]}) == []
