"""A record carries its own settings and choices, and a rerun of one cell per row decides whether it is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import study_records
from confirm import confirm
from evidence import Task, take
from lab.studies.conftest import tiny_study
from polyfed.lab.studies.cells import Chosen, Places, StudyPlan
from polyfed.lab.studies.columns.metrics import Gauge
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.runner import run_study
from polyfed.lab.studies.study import Study
from record_checks import STUDIES, column_key, conflicts, current, faults, of_rows, standing
from small_federations import tiny_experiment
from study_records import Again, StudyRecord, is_complete, read_record, record_text

NAME = "polyfed/mine"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study that is listed."""
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(content()))
    monkeypatch.setitem(STUDIES, NAME, path)
    monkeypatch.setattr(study_records, "STUDIES", {NAME: path})
    return path


def content(**more: Any) -> dict[str, Any]:
    return tiny_study(**{"base": tiny_experiment(), **more})


def record(name: str = NAME, plus: float = 0.0, **more: Any) -> StudyRecord:
    """A study that was run, without its files."""
    study = Study.model_validate(content(**more))
    labels = [f"{row}, seed {seed}" for row in study.rows for seed in study.seeds]
    values = {(row, (), "r1"): {seed: 10.0 + seed + plus for seed in study.seeds} for row in study.rows}
    cells, code = {label: f"name of {label}" for label in labels}, {row: ["0.3.0 abc"] for row in study.rows}
    return StudyRecord(name, "small", Results(study, values, cells=cells, code=code))


@pytest.mark.parametrize(("kept", "left"), [("a", ["a, more"]), ("a, more", ["a"])])
def test_a_row_whose_name_begins_anothers_is_kept_apart(kept: str, left: list[str]) -> None:
    own = record(rows={"a": {}, "a, more": {"set": {"run.rounds": 2}}})
    (row,) = of_rows(own, [kept]).results.code
    assert row == kept
    assert {*of_rows(own, [kept]).results.cells} == {f"{kept}, seed {seed}" for seed in own.study.seeds}
    assert not is_complete(of_rows(own, [kept]).results, left[0])


def kept(home: Path, own: StudyRecord) -> Path:
    path = home / "polyfed" / "records" / "mine.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(record_text(own.results, own.again))
    return path


def test_a_gauge_is_identified_by_its_parts() -> None:
    files = ("/a/features.py:Features", "papers/features.py:Features")
    one, other = ({"name": "analysis", "analysis": file, "figure": "x"} for file in files)
    assert column_key(Gauge(shows=one, minus=one, reads="a")) == column_key(Gauge(shows=other, minus=other, reads="b"))
    assert column_key(Gauge(shows=one, reads="")) != column_key(Gauge(shows=one, minus="r1_sum", reads=""))


def test_two_figures_for_one_cell_are_named(file: Path, tmp_path: Path) -> None:
    own, other = record(), record("polyfed/other", plus=0.5)
    assert conflicts([own, record("polyfed/other")]) == []
    assert conflicts([own, other]) == [
        "cell name of tiny, seed 0: polyfed/mine.json, tiny, seed 0, r1 is 10, "
        "polyfed/other.json, tiny, seed 0, r1 is 10.5, and 3 more"
    ]
    kept(tmp_path, own)
    assert faults(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"title": "other words", "claims": {"method": ["prox > tiny on r1"]}}, ["tiny", "prox"]),
        ({"rows": {**content()["rows"], "new": {}}}, ["tiny", "prox"]),
        ({"set": {"run.rounds": 2}}, []),
        ({"rows": {"tiny": {}, "prox": {"set": {"algorithm": "fedprox"}}}}, ["tiny"]),
    ],
)
def test_the_queue_has_changed_rows_and_the_page_still_shows_the_record(
    file: Path, tmp_path: Path, changes: dict[str, Any], rows: list[str]
) -> None:
    file.write_text(json.dumps(content(**changes)))
    plan = StudyPlan(Study.load(file), Places(), tmp_path)
    assert [*current(record(), plan).results.code] == rows
    kept(tmp_path, record())
    (shown,) = standing(tmp_path)
    assert [*shown.results.code] == ["tiny", "prox"]
    assert Task(NAME, home=tmp_path).missing()[0] == 2 * (len(plan.study.rows) - len(rows))


@pytest.mark.parametrize(("seed", "is_kept"), [(None, False), (0, True)])
def test_rows_that_were_tuned_once_for_all_seeds_are_queued(
    file: Path, tmp_path: Path, seed: Any, is_kept: bool
) -> None:
    rate = {"rate": {"paths": ["clients.*.training.optimizer.lr"]}}
    own = record(tuning={"settings": rate, "column": {"metric": "r1_sum", "kind": "validation"}})
    choice = Chosen({"rate": 2.0}, {}, {"rate x 2": 1.0})
    seeds = own.study.seeds if seed == 0 else [None]
    chosen = {(row, (), one): choice for row in own.study.rows for one in seeds}
    own = replace(own, results=replace(own.results, chosen=chosen))
    assert bool(current(own, StudyPlan(own.study, Places(), tmp_path)).results.code) == is_kept


def test_a_page_shows_todays_words_with_the_remaining_figures(file: Path, tmp_path: Path) -> None:
    file.write_text(json.dumps(content(title="new words", rows={"tiny": {}, "new": {}})))
    kept(tmp_path, record())
    (shown,) = standing(tmp_path)
    assert shown.study.title == "new words"
    assert [*shown.results.values] == [("tiny", (), "r1")]
    assert [*shown.results.cells] == ["tiny, seed 0", "tiny, seed 1"]


def test_a_row_whose_cell_has_other_figures_is_hidden(file: Path, tmp_path: Path) -> None:
    again = {"tiny": Again("tiny, seed 0", "0.5.0 def", 0.31, {"r1": [10.0, 11.0]}), "prox": Again("prox, seed 1", "")}
    path = kept(tmp_path, replace(record(), again=again))
    (shown,) = standing(tmp_path)
    assert [*shown.results.code] == ["prox"]
    assert read_record(NAME, "small", path).again == again
    assert Task(NAME, home=tmp_path).missing()[0] == 2  # and queued


@pytest.mark.slow
def test_a_hidden_row_runs_anew_even_where_its_cells_are_kept(file: Path, tmp_path: Path) -> None:
    task = Task(NAME, home=tmp_path)
    task.run(tmp_path / "runs" / "mine", Places(), 1, None)
    assert task.record is not None
    again = {**task.record.again, "tiny": Again("tiny, seed 0", "", 9.0, {"r1": [1.0, 2.0]})}
    kept(tmp_path, replace(task.record, again=again))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/cells/*/figures.json")}
    task.run(tmp_path / "runs" / "mine", Places(), 1, None)
    changed = [path for path, when in before.items() if path.stat().st_mtime_ns != when]
    assert len(changed) == 2  # both seeds of the row
    assert task.record.hidden == []


@pytest.mark.slow
def test_rows_of_an_earlier_study_stay_until_all_can_be_replaced(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = record(set={"run.rounds": 2})
    path = kept(tmp_path, old)
    task, written = Task(NAME, home=tmp_path), []
    monkeypatch.setattr("evidence.write_atomically", lambda path, text: written.append(json.loads(text)["code"]))
    task.run(tmp_path / "runs" / "mine", Places(), 1, None)
    assert [{*rows} for rows in written[:1]] == [{"tiny", "prox"}]
    assert read_record(NAME, "small", path).results.code == old.results.code  # a kill before leaves it as it was


@pytest.mark.slow
def test_a_cell_is_run_again_as_the_record_has_it(file: Path, tmp_path: Path) -> None:
    study = Study.model_validate(content(seeds=2, rows={"tiny": {}}))
    results = run_study(study, tmp_path / "runs" / "mine", jobs=1).results
    own = StudyRecord(NAME, "small", results)
    path = kept(tmp_path, own)
    file.write_text(json.dumps(content(seeds=2, rows={"tiny": {"set": {"run.rounds": 2}}})))  # without an effect
    assert confirm(own, ["tiny"], 0, Places(), tmp_path) == []
    again = read_record(NAME, "small", path).again["tiny"]
    assert (again.distance, again.figures) == (0.0, {})
    assert again.cell in results.cells
    values = {place: dict.fromkeys(by_seed, 123.0) for place, by_seed in results.values.items()}
    wrong = replace(own, results=replace(results, values=values))
    assert confirm(wrong, ["tiny"], 0, Places(), tmp_path) == ["tiny"]
    assert set(read_record(NAME, "small", path).again["tiny"].figures) == {"r1", "MiB"}


@pytest.mark.slow
def test_the_queue_writes_complete_rows_and_goes_on_from_the_record_alone(file: Path, tmp_path: Path) -> None:
    task = Task(NAME, home=tmp_path)
    task.run(tmp_path / "runs" / "mine", Places(), 1, None)
    assert task.record is not None
    first = task.record
    assert [row for row in first.study.rows if is_complete(first.results, row)] == ["tiny", "prox"]
    assert {*first.again} == {"tiny", "prox"}
    assert first.hidden == []
    assert task.missing() == (0, 0)
    file.write_text(json.dumps(content(rows={**content()["rows"], "longer": {"set": {"run.rounds": 2}}})))
    later = Task(NAME, home=tmp_path)
    assert later.missing()[0] == 2
    later.run(tmp_path / "elsewhere" / "mine", Places(), 1, None)  # on a machine that has no cell of before
    assert len([*(tmp_path / "elsewhere" / "cells").glob("*/figures.json")]) == 2
    assert later.record is not None
    assert later.record.results.at("tiny", (), "r1") == first.results.at("tiny", (), "r1")
    assert {*later.record.results.code} == {"tiny", "prox", "longer"}


def test_records_of_the_queue_are_taken_over_as_they_are(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept(tmp_path / "queue", record())
    monkeypatch.setattr("evidence.PAPERS", tmp_path / "papers")
    assert take(tmp_path / "queue") == [NAME]
    assert (tmp_path / "papers" / "polyfed" / "records" / "mine.json").read_bytes() == path.read_bytes()
    assert take(tmp_path / "queue") == []
