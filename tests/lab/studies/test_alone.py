"""Rows below the row of clients that train alone are named beside the tables."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from polyfed.lab.studies.tables import figure_tables


@pytest.mark.parametrize(
    ("rows", "lower", "expected"),
    [
        ({"a": [1.0, 1.1, 0.9], "b": [3.0, 1.0, 2.0], "local": [2.0] * 3}, False, ["below training alone (local): a."]),
        ({"a": [3.0], "b": [1.0], "local": [2.0]}, False, ["below training alone (local): b."]),
        ({"a": [3.0], "b": [1.0], "local": [2.0]}, True, ["below training alone (local): a."]),
        ({"a": [3.0], "local": [2.0]}, False, ["nothing is below training alone (local)."]),
        ({"a": [1.0], "b": [2.0]}, False, []),
    ],
)
def test_rows_below_training_alone_are_named(
    loaded: Callable[..., Study], rows: dict[str, list[float]], lower: bool, expected: list[str]
) -> None:
    columns = {"x": {"metric": "r1_sum", "lower": lower}, "MiB": {"name": "traffic"}}
    study = loaded(rows={name: {} for name in rows}, columns=columns)
    values = {(name, (), "x"): dict(enumerate(by_seed)) for name, by_seed in rows.items()}
    (table,) = figure_tables(Results(study, values))
    assert [note for note in table.notes if "alone" in note] == [f"x: {note}" for note in expected]
