"""Which cells a row's search needs for each seed, what it chooses, and which tables take its choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.studies.conftest import tiny_study
from lab.studies.test_planning import RATES, complete, planned
from polyfed.core.errors import ConfigError, RunError
from polyfed.lab.studies.cells import Cell, Chosen, SearchIncompleteError, StudyPlan
from polyfed.lab.studies.study import Study

Load = Callable[..., Study]
AXIS = {"rounds": {"setting": "run.rounds", "values": [1, 2]}}
SERVER = {"paths": ["server.training.optimizer.lr"]}
CREAMFL: dict[str, Any] = {"set": {"algorithm": {"name": "creamfl", "local_epochs": 1}}}


def tuned(loaded: Load, store: Path, rows: dict[str, Any] | None = None, **more: Any) -> StudyPlan:
    return planned(loaded(rows=rows or {"a": {}}, tuning=RATES | more.pop("tuning", {}), **more), store)


def due(plan: StudyPlan, row: str, store: Path, seed: int = 0) -> list[Cell]:
    return [cell for cell in plan.search(row, plan.study.points_of(row)[0], seed) if not cell.folder(store).is_dir()]


def answered(plan: StudyPlan, row: str, store: Path, *values: float | str, seed: int = 0) -> list[str]:
    """Due candidates, after each in turn is completed with one of the values."""
    for value in values:
        complete(due(plan, row, store, seed)[0], store, {plan.tuning.column.digest: value})
    return [cell.purpose for cell in due(plan, row, store, seed)]


def rates(plan: StudyPlan, row: str, point: tuple[str, ...] = (), seed: int = 0) -> set[float]:
    return {group.training.optimizer.lr for group in plan.cell(row, point, seed).experiment.clients.values()}


def test_each_seed_chooses_on_its_own_validation_and_then_is_the_cell(loaded: Load, tmp_path: Path) -> None:
    plan = tuned(loaded, tmp_path, {"a": {}, "plain": {"tune": False}}, tuning={"candidates": 3})
    assert plan.search("plain", (), 0) == []
    assert plan.chosen("plain", (), 0) is None
    (before,) = rates(plan, "plain")
    assert [(cell.purpose, cell.seed) for cell in plan.search("a", (), 1)] == [("as given", 1)]
    assert answered(plan, "a", tmp_path, 4.0) == ["rate x 2", "rate x 0.5"]
    assert answered(plan, "a", tmp_path, 9.0) == ["rate x 0.5"]
    with pytest.raises(SearchIncompleteError):
        plan.chosen("a", (), 0)
    assert answered(plan, "a", tmp_path, float("nan")) == []
    chosen = plan.chosen("a", (), 0)
    assert (chosen.factors, chosen.ends) == ({"rate": 2.0}, ["rate"])  # the candidates were spent
    groups = plan.check("a", ()).clients
    assert chosen.settings == {f"clients.{group}.training.optimizer.lr": 2 * before for group in groups}
    assert chosen.scores["as given"] == 4.0
    assert plan.cell("a", (), 0).digest == plan.search("a", (), 0)[1].digest  # the candidate, not run twice
    assert plan.columns(plan.search("a", (), 0)[0]) == [plan.study.tuning.column]  # type: ignore[union-attr]
    assert answered(plan, "a", tmp_path, 4.0, 1.0, 2.0, seed=1) == []
    assert (rates(plan, "a"), rates(plan, "a", seed=1)) == ({2 * before}, {before})


def test_another_plan_finds_its_way_by_the_figures_alone(loaded: Load, tmp_path: Path) -> None:
    study = loaded(rows={"a": {}}, tuning=RATES | {"candidates": 5})
    first = planned(study, tmp_path)
    assert answered(first, "a", tmp_path, 1.0, 2.0) == ["rate x 0.5"]
    again = planned(study, tmp_path)  # as after a kill
    assert [cell.purpose for cell in again.search("a", (), 0)] == ["as given", "rate x 2", "rate x 0.5"]
    assert answered(again, "a", tmp_path, 0.0) == ["rate x 4"]
    assert answered(first, "a", tmp_path) == ["rate x 4"]


def test_what_was_chosen_before_needs_no_search(loaded: Load, tmp_path: Path) -> None:
    study = loaded(rows={"a": {}}, tuning=RATES)
    known = {("a", (), 0): Chosen({"rate": 4.0}, {}, {"rate x 4": 1.0})}
    plan = StudyPlan(study, planned(study, tmp_path).places, tmp_path, known)
    before = {group.training.optimizer.lr for group in plan.check("a", ()).clients.values()}
    assert rates(plan, "a") == {4 * rate for rate in before}
    with pytest.raises(SearchIncompleteError):
        plan.cell("a", (), 1)


def test_lower_is_better_for_such_a_column(loaded: Load, tmp_path: Path) -> None:
    column = RATES["column"] | {"lower": True}  # type: ignore[operator]
    plan = tuned(loaded, tmp_path, tuning={"column": column, "candidates": 3})
    answered(plan, "a", tmp_path, 5.0, 9.0, 4.0)
    chosen = plan.chosen("a", (), 0)
    assert (chosen.factors, chosen.scores["rate x 2"]) == ({"rate": 0.5}, 9.0)


def test_where_no_candidate_has_a_figure_the_row_fails(loaded: Load, tmp_path: Path) -> None:
    plan = tuned(loaded, tmp_path)
    assert answered(plan, "a", tmp_path, "nobody has it", "nobody", float("nan")) == []
    for question in (plan.chosen, plan.cell):
        with pytest.raises(RunError, match=r"tuning\.column: no candidate has a figure; nothing is chosen"):
            question("a", (), 0)


def test_a_candidate_that_failed_ranks_last(loaded: Load, tmp_path: Path) -> None:
    plan = tuned(loaded, tmp_path)
    assert answered(plan, "a", tmp_path, 3.0) == ["rate x 2", "rate x 0.5"]
    plan.failed.add(plan.search("a", (), 0)[1].digest)
    assert answered(plan, "a", tmp_path) == ["rate x 2", "rate x 0.5"]
    complete(plan.search("a", (), 0)[2], tmp_path, {plan.study.tuning.column.digest: 4.0})  # type: ignore[union-attr]
    assert plan.search("a", (), 0)[-1].purpose == "rate x 0.25"


def test_a_choice_is_made_once_and_goes_to_all_points(loaded: Load, tmp_path: Path) -> None:
    rows = {"a": {}, "late": {"only": {"rounds": [2]}}}
    plan = tuned(loaded, tmp_path, rows, axes=AXIS, tuning={"candidates": 2})
    answered(plan, "a", tmp_path, 1.0, 2.0)
    before = {group.training.optimizer.lr for group in plan.check("a", ("1",)).clients.values()}
    assert rates(plan, "a", ("1",)) == rates(plan, "a", ("2",)) == {2 * rate for rate in before}
    assert {cell.experiment.run.rounds for cell in plan.search("a", ("2",), 0)} == {1}
    assert {cell.experiment.run.rounds for cell in plan.search("late", ("2",), 0)} == {2}  # its first point
    each = tuned(loaded, tmp_path, rows, axes=AXIS, tuning={"at": "point"})
    assert {cell.experiment.run.rounds for cell in each.search("a", ("2",), 0)} == {2}


def test_what_an_axis_sets_is_not_tuned(loaded: Load, tmp_path: Path) -> None:
    axis = {"rate": {"setting": "clients.*.training.optimizer.lr", "values": [0.1, 0.3]}}
    settings = RATES["settings"] | {"server": SERVER}  # type: ignore[operator]
    plan = tuned(loaded, tmp_path, {"a": CREAMFL}, axes=axis, tuning={"settings": settings})
    assert answered(plan, "a", tmp_path, 1.0) == ["server x 2", "server x 0.5"]
    with pytest.raises(ConfigError, match=r"tuning\.settings\.rate\.paths: no tuned row has a number at 'clients\.\*"):
        plan.check_tuning(plan.row_points())


def test_a_kind_is_of_the_rows_that_it_names_and_that_have_it(loaded: Load, tmp_path: Path) -> None:
    rows = {
        "all": CREAMFL,
        "averages": {},
        "alone": CREAMFL | {"twin": "server-only"},
        "fixed": CREAMFL | {"twin": "server-only", "tune": False},
    }
    passes = {"paths": ["algorithm.server_epochs"], "factors": [1, 2], "rows": ["alone"]}
    settings = RATES["settings"] | {"server": SERVER, "passes": passes}  # type: ignore[operator]
    plan = tuned(loaded, tmp_path, rows, tuning={"settings": settings})
    kinds = {row: list(search.pattern.kinds) for row in rows if (search := plan.row_search(row, (), 0))}
    assert kinds == {"all": ["rate", "server"], "averages": ["rate"], "alone": ["server", "passes"]}
    plan.check_tuning(plan.row_points())


@pytest.mark.parametrize("path", ["clients.*.training.optimiser.lr", "algorithm.name", "server.training.optimizer.lr"])
def test_a_setting_that_no_row_has_is_refused(loaded: Load, tmp_path: Path, path: str) -> None:
    plan = tuned(loaded, tmp_path, tuning={"settings": {"rate": {"paths": ["clients.*.training.optimizer.lr", path]}}})
    with pytest.raises(ConfigError, match=r"tuning\.settings\.rate\.paths: no tuned row has a number at '"):
        plan.check_tuning(plan.row_points())


def other_table(folder: Path, main: dict[str, Any], rows: dict[str, Any], **tuning: Any) -> Study:
    """A table next to the main one of its paper."""
    (folder / "main.yaml").write_text(yaml.safe_dump(tiny_study(tuning=RATES, rows=main)))
    other = tiny_study(tuning={"table": "main", **tuning}, rows=rows, set={"run.rounds": 2})
    (folder / "other.yaml").write_text(yaml.safe_dump(other))
    return Study.load(folder / "other.yaml")


def test_another_table_takes_seed_by_seed_what_the_main_table_chose(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    study_file(tiny_study())  # and the experiment
    part = {"set": {"algorithm.local_epochs": 2}}
    study = other_table(tmp_path, {"a": {}, "b": {}}, {"a": {}, "part": part, "as b": {"tune": "b"}}, default_row="a")
    plan, store = planned(study, tmp_path / "cells"), tmp_path / "cells"
    assert plan.main is not None
    before = {group.training.optimizer.lr for group in plan.check("a", ()).clients.values()}
    assert {cell.experiment.run.rounds for cell in plan.search("part", (), 1)} == {1}  # of the main table
    answered(plan, "part", store, 1.0, 2.0, 0.0, 0.5, seed=1)
    assert rates(plan, "a", seed=1) == rates(plan, "part", seed=1) == {2 * rate for rate in before}
    assert plan.cell("part", (), 1).experiment.run.rounds == 2
    for row, seed in (("a", 0), ("as b", 0)):
        with pytest.raises(SearchIncompleteError):
            plan.cell(row, (), seed)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"part": {}}, "rows.part.tune: the main table has no row 'part'.*; or give rows.part.tune: false"),
        ({"a": {"tune": "c"}}, "rows.a.tune: the main table has no row 'c'"),
    ],
)
def test_a_row_that_the_main_table_lacks_is_named(
    study_file: Callable[..., Path], tmp_path: Path, rows: dict[str, Any], message: str
) -> None:
    study_file(tiny_study())
    plan = planned(other_table(tmp_path, {"a": {}}, rows), tmp_path)
    with pytest.raises(ConfigError, match=message):
        plan.check(next(iter(rows)), ())
