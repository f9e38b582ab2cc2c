"""Figures on pages of searches, of validation by round and of costs, from figures made up by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyfed.lab.studies.cells import Places, StudyPlan
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.runner import CELLS, run_study
from polyfed.lab.studies.study import Study
from polyfed.reporting.compare import Spread
from polyfed.runs.opened import open_run
from study_pictures import front, has_middle, is_rising, pictures_of, role_of

Load = Callable[..., Study]
COSTS = {"r1": "r1_sum", "MiB": {"name": "traffic"}, "CPU s": {"name": "cpu_seconds"}}
ROWS: dict[str, Any] = {
    "ours": {"set": {"algorithm": {"name": "fedprox", "local_epochs": 1}}},
    "ours, more": {"like": "ours"},
    "cheap": {},
    "dear": {},
    "alone": {"twin": "server-only"},
    "pooled": {"twin": "pooled"},
}
GAINS = "In the last third of rounds validation gains more than its spread over seeds: "
# row -> r1, MiB
AT = {"ours": (9, 3), "ours, more": (9, 4), "cheap": (5, 1), "dear": (4, 2), "alone": (2, 0), "pooled": (12, 0)}


@pytest.fixture
def costs(loaded: Load) -> Results:
    figures = [{"column": "r1", "over": ["MiB", "CPU s"]}]
    study = loaded(rows=ROWS, columns=COSTS, claims={"method": ["ours > cheap on r1"]}, figures=figures)
    by_place: dict[Any, Any] = {}
    for row, at in AT.items():
        for name, value in zip(("r1", "MiB"), at, strict=True):
            by_place[row, (), name] = {0: value - 0.1, 1: value + 0.1}
    return Results(study, by_place)


def test_rows_have_the_role_that_claims_and_twins_give_them(costs: Results) -> None:
    assert [role_of(costs.study, row) for row in ROWS] == ["own", "own", "rival", "rival", "control", "ceiling"]


def test_the_front_has_no_ceiling_and_nothing_that_is_dominated(costs: Results) -> None:
    assert front(costs, "r1", "MiB") == ["alone", "cheap", "ours"]
    assert front(costs, "r1", "CPU s") == []
    (picture,) = pictures_of(costs)
    assert picture.name == "costs-1"
    assert picture.sentence == "Not dominated, r1 against MiB: alone; cheap; ours."
    (by_cost,) = picture.draw().axes  # CPU seconds are not known
    containers: Any = by_cost.containers
    positions = [container.lines[0].get_xydata().tolist() for container in containers]
    assert positions == [[[mib, pytest.approx(r1)]] for r1, mib in AT.values()]
    assert [text.get_text() for text in by_cost.texts] == sorted(AT, key=lambda row: -AT[row][0])
    boxes = [text.get_window_extent() for text in by_cost.texts]
    assert not any(one.overlaps(other) for one in boxes for other in boxes if one is not other)


def test_validation_still_rises_where_it_gains_more_than_seeds_differ() -> None:
    curve = {round_: Spread(value, 0.5) for round_, value in ((0, 0.0), (3, 5.0), (6, 8.0), (9, 9.0))}
    assert is_rising(curve)
    assert not is_rising({**curve, 9: Spread(8.4, 0.5)})
    assert not is_rising(curve, lower=True)
    assert not is_rising({9: Spread(8.4, 0.5)})
    assert has_middle(curve)
    assert not has_middle({0: curve[0], 9: curve[9]})


@pytest.mark.slow
def test_curves_are_of_the_cells_that_validate(loaded: Load, tmp_path: Path) -> None:
    validation = {"metric": "r1_sum", "kind": "validation", "round": "best"}
    rate = {"rate": {"paths": ["clients.*.training.optimizer.lr"], "factors": [1.0, 1.5]}}
    tuning = {"settings": rate, "column": validation, "candidates": 1}
    tuning |= {"set": {"server.validation_split": "validation"}}
    rows = {"own": {}, "tuned": {"set": {"server.validation_split": None}}}
    study = loaded(rows=rows, seeds=2, set={"run.rounds": 2}, tuning=tuning)
    results = run_study(study, tmp_path / "out", jobs=1).results
    plan = StudyPlan(study, Places(), tmp_path / CELLS)
    for row, cells in (
        ("own", [plan.cell("own", (), seed) for seed in study.seeds]),
        ("tuned", [plan.search("tuned", (), seed)[0] for seed in study.seeds]),
    ):
        by_seed = [open_run(cell.folder(plan.store)).records.series("server", "r1_sum", "validation") for cell in cells]
        assert list(results.curves[row, ()]) == [0, 1, 2]
        for number, spread in results.curves[row, ()].items():
            assert spread.mean == pytest.approx(sum(one[number] for one in by_seed) / len(by_seed), rel=1e-3)
    assert Results.from_json(study, results.to_json()).to_json() == results.to_json()
    (axes,) = next(one for one in pictures_of(results) if one.name == "curves").draw().axes
    assert {text.get_text() for text in axes.texts} == {"own", "tuned"}
    ends: dict[Any, Any] = {(row, ()): {0: Spread(1.0, 0.1), 2: Spread(2.0, 0.1)} for row in rows}
    (seldom,) = [one for one in pictures_of(replace(results, curves=ends)) if one.name == "curves"]
    assert seldom.sentence.startswith("Validated too seldom")
    flat: dict[Any, Any] = {where: {**curve, 1: Spread(1.5, 0.1)} for where, curve in ends.items()}
    (first, *_) = [one for one in pictures_of(replace(results, curves=flat)) if one.name == "curves"]
    assert first.sentence == f"{GAINS}own; tuned."
