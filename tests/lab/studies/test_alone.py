"""Rows below the row of clients that train alone are named beside the tables."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from polyfed.lab.studies.tables import claims_tables, figure_tables


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


@pytest.mark.parametrize(("column", "interval"), [("MiB", "-"), ("x", "+0.99 to +3.01")])
def test_costs_that_no_seed_changes_have_no_interval(loaded: Callable[..., Study], column: str, interval: str) -> None:
    columns = {"x": {"metric": "r1_sum"}, "MiB": {"name": "traffic"}}
    claims = {"primary": [f"a > b on {column}"], "secondary": [f"b > a on {column}"]}
    study = loaded(rows={"a": {}, "b": {}}, columns=columns, claims=claims, seeds=5)
    values = {(name, (), column): dict.fromkeys(range(5), figure) for name, figure in (("a", 3.0), ("b", 1.0))}
    primary, secondary = claims_tables(Results(study, values))
    assert primary.rows[0][1:5] == ["held", "5", "+2.00", interval]
    assert (primary.rows[0][5] == "-") == (column == "MiB")
    assert (secondary.rows[0][3] == "-") == (column == "MiB")
