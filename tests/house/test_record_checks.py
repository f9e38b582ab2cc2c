"""Records are of today's studies and code, or not shown; no cell has two figures; cells can be run again."""

from __future__ import annotations

import json
import re
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
BEFORE = "from before figures had generations, and no cell was run again"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """The exceptions: none as yet."""
    found: dict[str, dict[str, str]] = {"unconfirmed": {}, "stale": {}}
    monkeypatch.setattr(record_checks, "exceptions", lambda: found)
    return found


@pytest.fixture
def file(known: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a study that is listed."""
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(content()))
    monkeypatch.setitem(STUDIES, NAME, path)
    monkeypatch.setattr(study_records, "STUDIES", STUDIES)
    return path


def content(**more: Any) -> dict[str, Any]:
    tuning = {
        "settings": {"rate": {"paths": ["clients.*.training.optimizer.lr"]}},
        "column": {"metric": "r1_sum", "kind": "validation"},
    }
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
        ({}, "none"),
        ({"title": "other words", "claims": {"method": ["prox > tiny on r1"]}}, "none"),
        ({"rows": {**content()["rows"], "new": {}}}, "none"),
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
    file: Path, changes: dict[str, Any], reason: str
) -> None:
    file.write_text(json.dumps(content(**changes)))
    found = reasons(record()) or ["none"]
    assert any(re.match(rf"{reason}(\b|$)", line) for line in found), found


def test_a_gauge_goes_by_what_it_shows() -> None:
    files = ("/a/features.py:Features", "papers/features.py:Features")
    one, other = ({"name": "analysis", "analysis": file, "figure": "x"} for file in files)
    assert column_key(Gauge(shows=one, minus=one, reads="a")) == column_key(Gauge(shows=other, minus=other, reads="b"))
    assert column_key(Gauge(shows=one, reads="")) != column_key(Gauge(shows=one, minus="r1_sum", reads=""))


def test_figures_of_other_code_or_another_preset_are_stale(file: Path, known: dict[str, dict[str, str]]) -> None:
    own = record()
    assert reasons(own) == []
    assert reasons(replace(own, results=replace(own.results, settings={"tiny": "of another preset"}))) == [
        "tiny: other settings"
    ]
    assert reasons(replace(own, again={"tiny, seed 0": ["r1: 10, now 11"]})) == [
        "tiny, seed 0 has other figures by now (r1: 10, now 11)"
    ]
    assert "generations [7]" in reasons(record(generation=7))[0]
    assert reasons(record(generation=0)) == [BEFORE]
    known["unconfirmed"][NAME] = "no time yet"
    assert reasons(record(generation=0)) == []


def test_two_figures_for_one_cell_are_named_by_cell_or_by_settings_and_seed(file: Path) -> None:
    own, other = record(), record("polyfed/other", plus=0.5)
    assert conflicts([own, record("polyfed/other")]) == []
    assert conflicts([own, other]) == [
        "cell name of tiny, seed 0: polyfed/mine.json, tiny, seed 0, r1 is 10, "
        "polyfed/other.json, tiny, seed 0, r1 is 10.5, and 3 more"
    ]
    same = {"tiny": "digest of settings"}
    renamed = replace(other, results=replace(other.results, cells={"tiny, seed 1": "today's name"}, settings=same))
    assert conflicts([own, renamed]) == []
    (line,) = conflicts([replace(own, results=replace(own.results, settings=same)), renamed])
    assert line.startswith("cell digest of settings, seed 0: ")


def test_of_two_figures_that_counts_which_is_known_to_be_of_todays_code(
    file: Path, known: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STUDIES, "polyfed/other", file)
    known["unconfirmed"]["polyfed/other"] = "no time yet"
    now = Standing.of([record("polyfed/other", generation=0, plus=0.5), record()])
    assert [one.name for one in now.shown] == [NAME]
    assert "r1 is 10.5" in now.why["polyfed/other"][0]


def test_a_page_shows_todays_study_with_the_figures_that_it_still_has(file: Path) -> None:
    file.write_text(json.dumps(content(title="new words", rows={"tiny": {}, "new": {}})))
    (shown,) = Standing.of([record()]).shown
    assert shown.study.title == "new words"
    assert [*shown.results.values] == [("tiny", (), "r1")]
    assert [*shown.results.cells] == ["tiny, seed 0", "tiny, seed 1"]


def test_exceptions_only_shrink(file: Path, known: dict[str, dict[str, str]], tmp_path: Path) -> None:
    known |= {"unconfirmed": {NAME: "confirmed since"}, "stale": {"polyfed/gone": "was taken out"}}
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
    before = StudyRecord(NAME, "small", replace(results, generations=[0], settings={}))
    again = Again(before, Places())
    (cell,) = again.cells()
    assert cell.digest == results.cells["tiny, seed 0"]  # so that the figures are at hand here
    assert again.differences(cell, tmp_path / "runs" / "cells", 0.0) == []
    taken = json.loads(again.taken_over({cell.label: []}))
    now = {"generations": [GENERATION], "settings": {"tiny": results.settings["tiny"]}, "again": {"tiny, seed 0": []}}
    assert {key: taken[key] for key in now} == now

    again = Again(replace(before, results=replace(before.results, values={("tiny", (), "r1"): {0: 123.0}})), Places())
    differing = again.differences(cell, tmp_path / "runs" / "cells", 0.0)
    assert [line.partition(", now ")[0] for line in differing][:1] == ["r1: 123"]
    assert [line.partition(":")[0] for line in differing] == ["r1", "MiB"]
    assert json.loads(again.taken_over({cell.label: differing}))["generations"] == [0]
