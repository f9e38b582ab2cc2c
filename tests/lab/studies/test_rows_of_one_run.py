"""Rows that measure other things of the same run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from polyfed.lab.studies.cells import Places
from polyfed.lab.studies.planning import StudyPlan
from polyfed.lab.studies.session import run_study
from polyfed.lab.studies.study import Study
from polyfed.runs.opened import open_run

Load = Callable[..., Study]
ROWS: dict[str, Any] = {
    "server": {},
    "clients": {"like": "server", "columns": {"r1": {"of": "paired"}, "MiB": None}},
    "worst client": {"like": "clients", "columns": {"r1": {"of": "paired", "over": "worst"}}},
}


def test_they_share_a_cell_and_have_columns_of_their_own(loaded: Load, tmp_path: Path) -> None:
    study = loaded(seeds=1, rows=ROWS, claims={"primary": ["clients >= worst client on r1"]})
    results = run_study(study, tmp_path / "out", jobs=1).results
    (cell,) = set(results.cells.values())
    records = open_run(tmp_path / "cells" / cell).records
    own = [records.last(client)["r1_sum"] for client in records.groups["paired"]]
    assert results.at("server", (), "r1") == {0: records.last("server")["r1_sum"]}
    assert results.at("clients", (), "r1") == {0: pytest.approx(fmean(own))}
    assert results.at("worst client", (), "r1") == {0: min(own)}
    assert results.at("server", (), "MiB") != {}
    assert results.at("clients", (), "MiB") == results.at("worst client", (), "MiB") == {}
    assert results.causes == {}


def test_columns_of_a_cell_are_those_of_all_rows_that_are_the_same_run(loaded: Load, tmp_path: Path) -> None:
    study = loaded(seeds=1, rows=ROWS | {"later": {"like": "clients", "set": {"run.rounds": 2}}})
    plan = StudyPlan(study, Places(), tmp_path)
    cells = {row: plan.final(row, ())[0] for row in study.rows}
    assert {cells[row].digest for row in ROWS} == {cells["server"].digest} != {cells["later"].digest}
    measured = {row: [getattr(column, "over", "traffic") for column in plan.columns(cells[row])] for row in cells}
    assert measured["later"] == ["mean"]
    assert [measured[row] for row in ROWS] == [["mean", "traffic", "mean", "worst"]] * len(ROWS)
