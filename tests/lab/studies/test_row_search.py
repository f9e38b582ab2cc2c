"""Which cells a row's search needs, and what it chooses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.studies.test_planning import RATES, complete, planned
from polyfed.core.errors import ConfigError, RunError
from polyfed.lab.studies.cells import StudyPlan
from polyfed.lab.studies.study import Study

Load = Callable[..., Study]
RATE = 0.05
AXIS = {"rounds": {"setting": "run.rounds", "values": [1, 2]}}


def tuned(loaded: Load, store: Path, rows: dict[str, Any] | None = None, **more: Any) -> StudyPlan:
    tuning = RATES | {"seeds": [7]} | more.pop("tuning", {})
    return planned(loaded(rows=rows or {"a": {}}, tuning=tuning, **more), store)


def answered(plan: StudyPlan, row: str, store: Path, *values: float | str) -> list[str]:
    """What is due, after each in turn is completed with one of the values."""
    assert plan.study.tuning is not None
    digest = plan.study.tuning.column.digest
    point = plan.study.points_of(row)[0]
    for value in values:
        cell = next(cell for cell in plan.search(row, point) if not cell.folder(store).is_dir())
        complete(cell, store, {digest: value})
    return [cell.purpose for cell in plan.search(row, point) if not cell.folder(store).is_dir()]


def rates(plan: StudyPlan, row: str, point: tuple[str, ...] = ()) -> set[float]:
    return {group.training.optimizer.lr for group in plan.final(row, point)[0].experiment.clients.values()}


def test_a_row_is_tuned_on_the_mean_over_seeds_of_its_own(loaded: Load, tmp_path: Path) -> None:
    plan = planned(loaded(rows={"a": {}, "plain": {"tune": False}}, tuning=RATES | {"candidates": 3}), tmp_path)
    assert plan.search("plain", ()) == []
    assert plan.chosen("plain", ()) is None
    before = rates(plan, "plain").pop()
    assert [(cell.purpose, cell.seed) for cell in plan.search("a", ())] == [("as given", 7), ("as given", 8)]
    assert answered(plan, "a", tmp_path, 4.0, 6.0) == ["rate x 2", "rate x 0.5"]  # the first seed decides on others
    assert answered(plan, "a", tmp_path, 9.0, 11.0, 9.0) == ["rate x 0.5"]
    with pytest.raises(LookupError):  # the last candidate's second seed
        plan.chosen("a", ())
    assert answered(plan, "a", tmp_path, float("nan")) == []
    chosen = plan.chosen("a", ())
    assert chosen is not None
    assert (chosen.factors, chosen.ends) == ({"rate": 2.0}, ["rate"])  # a candidate that diverged once is out
    groups = plan.check("a", ()).clients
    assert chosen.settings == {f"clients.{group}.training.optimizer.lr": 2 * before for group in groups}
    assert chosen.scores["as given"] == [4.0, 6.0]
    assert rates(plan, "a") == {2 * before}
    assert plan.columns(plan.search("a", ())[0]) == [plan.study.tuning.column]  # type: ignore[union-attr]


def test_another_plan_finds_its_way_by_the_figures_alone(loaded: Load, tmp_path: Path) -> None:
    study = loaded(rows={"a": {}}, tuning=RATES | {"seeds": [7], "candidates": 5})
    first = planned(study, tmp_path)
    assert answered(first, "a", tmp_path, 1.0, 2.0) == ["rate x 0.5"]
    again = planned(study, tmp_path)  # as after a kill
    assert [cell.purpose for cell in again.search("a", ())] == ["as given", "rate x 2", "rate x 0.5"]
    assert answered(again, "a", tmp_path, 0.0) == ["rate x 4"]
    assert answered(first, "a", tmp_path) == ["rate x 4"]


def test_lower_is_better_where_the_column_says_so(loaded: Load, tmp_path: Path) -> None:
    column = RATES["column"] | {"lower": True}  # type: ignore[operator]
    plan = tuned(loaded, tmp_path, tuning={"column": column, "candidates": 3})
    answered(plan, "a", tmp_path, 5.0, 9.0, 4.0)
    chosen = plan.chosen("a", ())
    assert chosen is not None
    assert (chosen.factors, chosen.scores["rate x 2"]) == ({"rate": 0.5}, [9.0])


def test_where_no_candidate_has_a_figure_the_row_fails(loaded: Load, tmp_path: Path) -> None:
    plan = tuned(loaded, tmp_path)
    assert answered(plan, "a", tmp_path, "nobody has it", "nobody", float("nan")) == []
    for question in (plan.chosen, plan.final):
        with pytest.raises(RunError, match=r"tuning\.column: no candidate has a figure; nothing is chosen"):
            question("a", ())


def test_a_candidate_that_failed_ranks_last(loaded: Load, tmp_path: Path) -> None:
    plan = tuned(loaded, tmp_path)
    assert answered(plan, "a", tmp_path, 3.0) == ["rate x 2", "rate x 0.5"]
    plan.failed.add(plan.search("a", ())[1].digest)
    assert answered(plan, "a", tmp_path) == ["rate x 2", "rate x 0.5"]
    complete(plan.search("a", ())[2], tmp_path, {plan.study.tuning.column.digest: 4.0})  # type: ignore[union-attr]
    assert plan.search("a", ())[-1].purpose == "rate x 0.25"


def test_a_choice_is_made_once_and_goes_to_all_points(loaded: Load, tmp_path: Path) -> None:
    rows = {"a": {}, "late": {"only": {"rounds": [2]}}}
    plan = tuned(loaded, tmp_path, rows, axes=AXIS, tuning={"candidates": 2})
    answered(plan, "a", tmp_path, 1.0, 2.0)
    before = {group.training.optimizer.lr for group in plan.check("a", ("1",)).clients.values()}
    assert rates(plan, "a", ("1",)) == rates(plan, "a", ("2",)) == {2 * rate for rate in before}
    assert {cell.experiment.run.rounds for cell in plan.search("a", ("2",))} == {1}
    assert {cell.experiment.run.rounds for cell in plan.search("late", ("2",))} == {2}  # its first point
    each = tuned(loaded, tmp_path, rows, axes=AXIS, tuning={"at": "point"})
    assert {cell.experiment.run.rounds for cell in each.search("a", ("2",))} == {2}


def test_what_an_axis_sets_is_not_tuned(loaded: Load, tmp_path: Path) -> None:
    axis = {"rate": {"setting": "clients.*.training.optimizer.lr", "values": [0.1, 0.3]}}
    server = {"paths": ["server.training.optimizer.lr"]}
    creamfl = {"set": {"algorithm": {"name": "creamfl", "local_epochs": 1}}}
    plan = tuned(
        loaded, tmp_path, {"a": creamfl}, axes=axis, tuning={"settings": RATES["settings"] | {"server": server}}
    )  # type: ignore[operator]
    assert answered(plan, "a", tmp_path, 1.0) == ["server x 2", "server x 0.5"]
    with pytest.raises(ConfigError, match=r"tuning\.settings\.rate\.paths: no row .* a number at 'clients\.\*"):
        plan.check_tuning(plan.row_points())


def test_a_row_may_name_its_kinds_and_has_those_that_it_can(loaded: Load, tmp_path: Path) -> None:
    server = {"paths": ["server.training.optimizer.lr"]}
    creamfl = {"set": {"algorithm": {"name": "creamfl", "local_epochs": 1}}}
    rows = {
        "all": creamfl,
        "named": creamfl | {"tune": ["server"]},
        "averages": {},
        "alone": creamfl | {"twin": "server-only"},
        "fixed": creamfl | {"twin": "server-only", "tune": False},
    }
    plan = tuned(loaded, tmp_path, rows, tuning={"settings": RATES["settings"] | {"server": server}})  # type: ignore[operator]
    kinds = {row: list(search.pattern.kinds) for row in rows if (search := plan.row_search(row, ()))}
    assert kinds == {"all": ["rate", "server"], "named": ["server"], "averages": ["rate"], "alone": ["server"]}
    for row in ("fixed", "alone"):  # by the study, or not at all
        twin = plan.experiment(row, ()).twin
        assert twin is not None
        assert not twin.is_to_be_tuned
    plan.check_tuning(plan.row_points())


def test_rows_of_one_run_share_a_search(loaded: Load, tmp_path: Path) -> None:
    rows = {"one": {}, "same": {"set": {"description": "x"}}, "other": {"set": {"run.rounds": 2}}}
    plan = tuned(loaded, tmp_path, rows)
    assert plan.search("one", ())[0].digest == plan.search("same", ())[0].digest != plan.search("other", ())[0].digest


@pytest.mark.parametrize("path", ["clients.*.training.optimiser.lr", "algorithm.name", "server.training.optimizer.lr"])
def test_a_setting_that_no_row_has_is_refused(loaded: Load, tmp_path: Path, path: str) -> None:
    settings = {"rate": {"paths": ["clients.*.training.optimizer.lr", path]}}
    plan = tuned(loaded, tmp_path, tuning={"settings": settings})
    with pytest.raises(ConfigError, match=r"tuning\.settings\.rate\.paths: no row that is tuned has a number at '"):
        plan.check_tuning(plan.row_points())
