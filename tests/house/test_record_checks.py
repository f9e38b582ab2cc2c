"""Records are of today's studies and code, or not shown; no cell has two figures; cells can be run again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import record_checks
import study_records
from confirm import Again
from lab.studies.conftest import tiny_study
from polyfed.core.version import GENERATION
from polyfed.lab.studies.cells import Places
from polyfed.lab.studies.columns.gauges import Gauge
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.runner import run_study
from polyfed.lab.studies.study import Study
from record_checks import STUDIES, Standing, column_key, conflicts, faults, reasons
from small_federations import tiny_experiment
from study_records import StudyRecord, record_text

NAME = "polyfed/mine"
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a study that is listed."""
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(content()))
    monkeypatch.setitem(STUDIES, NAME, path)
    monkeypatch.setattr(study_records, "STUDIES", STUDIES)
    monkeypatch.setattr(record_checks, "exceptions", lambda: {"unconfirmed": {}, "stale": {}})
    return path


def content(**more: Any) -> dict[str, Any]:
    tuned = {"settings": {"rate": {"paths": ["clients.*.training.optimizer.lr"]}}, "seeds": [100, 101, 102]}
    tuning = {**tuned, "column": {"metric": "r1_sum", "kind": "validation"}}
    return tiny_study(**{"base": tiny_experiment(), "tuning": tuning, **more})


def record(name: str = NAME, generation: int = GENERATION, plus: float = 0.0, **more: Any) -> StudyRecord:
    """What was run of a study, with today's settings unless they are older than records of them."""
    study = Study.model_validate(content(**more))
    labels = [f"{row}, seed {seed}" for row in study.rows for seed in study.seeds]
    values = {(row, (), "r1"): {seed: 10.0 + seed + plus for seed in study.seeds} for row in study.rows}
    cells, generations = {label: f"name of {label}" for label in labels}, [generation]
    return StudyRecord(name, "small", Results(study, values, cells=cells, code=("0.3.0 abc",), generations=generations))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"title": "other words", "claims": {"method": ["prox > tiny on r1"]}}, None),
        (
            {"rows": {"tiny": {}, "prox": {"set": {"algorithm": {"name": "fedprox", "local_epochs": 1}}}, "new": {}}},
            None,
        ),
        ({"set": {"run.rounds": 2}}, "tiny: other settings"),
        ({"rows": {"tiny": {}, "prox": {"set": {"algorithm": "fedprox"}}}}, "prox: other settings"),
        ({"rows": {"other": {}}}, "none of its rows is there by now"),
        ({"seeds": 3}, r"seeds \[0, 1\], now \[0, 1, 2\]"),
        ({"columns": {"r1": "r10_sum"}}, "column r1 of tiny is another"),
        ({"base": "no-such-preset"}, "cannot be resolved: .*no-such-preset"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_study_that_runs_something_else_by_now_makes_its_record_stale(
    file: Path, changes: dict[str, Any], reason: str | None
) -> None:
    file.write_text(json.dumps(content(**changes)))
    found = reasons(record())
    if reason is None:
        assert found == []
    else:
        assert any(re.match(reason, line) for line in found), found


def test_a_gauge_goes_by_what_it_shows() -> None:
    files = ("/a/features.py:Features", "papers/features.py:Features")
    shown = [{"name": "analysis", "analysis": file, "figure": "x"} for file in files]
    assert len({column_key(Gauge(shows=one, minus=one, reads=one["analysis"])) for one in shown}) == 1
    assert column_key(Gauge(shows=shown[0], reads="")) != column_key(Gauge(shows=shown[0], minus="r1_sum", reads=""))


def test_a_record_keeps_the_settings_of_the_preset_as_it_was(file: Path) -> None:
    own = record()
    assert reasons(replace(own, results=replace(own.results, settings={"tiny": "of another preset"}))) == [
        "tiny: other settings"
    ]


def test_figures_of_another_generation_are_stale_and_unknown_ones_until_a_cell_was_run_again(file: Path) -> None:
    assert reasons(record()) == []
    assert "generations [7]" in reasons(record(generation=7))[0]
    assert reasons(record(generation=0)) == ["from before figures had generations, and no cell was run again"]
    known: Mapping[str, Mapping[str, str]] = {"unconfirmed": {NAME: "no time yet"}, "stale": {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_checks, "exceptions", lambda: known)
        assert reasons(record(generation=0)) == []
    assert reasons(replace(record(), again={"tiny, seed 0": ["r1: 10, now 11"]})) == [
        "tiny, seed 0 has other figures by now (r1: 10, now 11)"
    ]


def test_two_figures_for_one_cell_are_named(file: Path) -> None:
    assert conflicts([record(), record("polyfed/other")]) == []
    (line,) = conflicts([record(), record("polyfed/other", plus=0.5)])
    assert line == (
        "cell name of tiny, seed 0: polyfed/mine.json, tiny, seed 0, r1 is 10, "
        "polyfed/other.json, tiny, seed 0, r1 is 10.5, and 3 more"
    )
    other = record("polyfed/other", plus=0.5)
    same = {"tiny": "digest of settings"}
    renamed = replace(other, results=replace(other.results, cells={"tiny, seed 1": "today's name"}, settings=same))
    assert conflicts([record(), renamed]) == []
    (line,) = conflicts([replace(record(), results=replace(record().results, settings=same)), renamed])
    assert line.startswith("cell digest of settings, seed 0: ")


def test_of_two_figures_that_counts_which_is_known_to_be_of_todays_code(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STUDIES, "polyfed/other", file)
    known = {"unconfirmed": {"polyfed/other": "no time yet"}, "stale": {}}
    monkeypatch.setattr(record_checks, "exceptions", lambda: known)
    now = Standing.of([record("polyfed/other", generation=0, plus=0.5), record()])
    assert [one.name for one in now.shown] == [NAME]
    assert "r1 is 10.5" in now.why["polyfed/other"][0]


def test_a_page_shows_todays_study_with_the_figures_that_it_still_has(file: Path) -> None:
    file.write_text(json.dumps(content(title="new words", rows={"tiny": {}, "new": {}})))
    (shown,) = Standing.of([record()]).shown
    assert shown.study.title == "new words"
    assert [*shown.results.values] == [("tiny", (), "r1")]
    assert [*shown.results.cells] == ["tiny, seed 0", "tiny, seed 1"]


def test_exceptions_only_shrink(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"unconfirmed": {NAME: "confirmed since"}, "stale": {"polyfed/gone": "was taken out"}}
    monkeypatch.setattr(record_checks, "exceptions", lambda: known)
    path = tmp_path / "polyfed" / "records" / "mine.json"
    path.parent.mkdir(parents=True)
    path.write_text(record_text(record().results))
    assert faults(tmp_path) == [
        "exceptions.toml: stale: polyfed/gone is not: take it out",
        "exceptions.toml: unconfirmed: polyfed/mine is not: take it out",
    ]
    path.write_text(record_text(record(seeds=3, generation=0).results))
    assert faults(tmp_path)[0] == "stale: polyfed/mine: seeds [0, 1, 2], now [0, 1]"


def test_a_cell_that_is_run_again_confirms_its_record_or_makes_it_stale(file: Path, tmp_path: Path) -> None:
    study = Study.model_validate(content(tuning=None, seeds=1, rows={"tiny": {}}))
    file.write_text(json.dumps(study.content()))
    results = run_study(study, tmp_path / "runs" / "mine", jobs=1).results
    assert results.generations == [GENERATION]
    assert results.settings.keys() == {"tiny"}
    before = StudyRecord(NAME, "small", replace(results, generations=[0], settings={}))
    again = Again(before, Places())
    (cell,) = again.cells()
    assert cell.digest == results.cells["tiny, seed 0"]  # so that the figures are at hand here
    store = tmp_path / "runs" / "cells"
    assert again.differences(cell, store, 0.0) == []
    taken = json.loads(again.taken_over({cell.label: []}))
    assert (taken["generations"], taken["settings"]) == ([GENERATION], dict(results.settings))
    assert taken["again"] == {"tiny, seed 0": []}

    other = replace(results, values={("tiny", (), "r1"): {0: 123.0}})
    again = Again(replace(before, results=other), Places())
    differing = again.differences(cell, store, 0.0)
    assert [line.partition(":")[0] for line in differing] == ["r1", "MiB"]
    assert differing[0].startswith("r1: 123, now ")
    assert json.loads(again.taken_over({cell.label: differing}))["generations"] == list(other.generations)
