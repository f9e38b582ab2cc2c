"""What pages say of records: claims that hold, what was run of a paper, and how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import study_records
from lab.studies.conftest import tiny_study
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from small_federations import tiny_experiment
from study_records import (
    StudyRecord,
    evidence_section,
    papers_own,
    record_pictures,
    record_text,
)

AXES = {"pairs": {"setting": "run.seed", "values": [1, 5]}}


def record(item: str = "Table 1", runs: int = 20, **more: Any) -> StudyRecord:
    """``prox`` is above ``tiny`` by about 2 at the first point, and below it by as much at the second."""
    settings = {
        "base": tiny_experiment(), "seeds": 5, "axes": AXES, "source": {"paper": "Tiny", "item": item},
        "claims": {"primary": ["prox > tiny on r1 at 1", "prox > tiny on r1 at 5"]},
        "figures": [{"map": "prox > tiny on r1", "x": "pairs"}],
    }  # fmt: skip
    study = Study.model_validate(tiny_study(**(settings | more)))
    values: dict[tuple[str, tuple[str, ...], str], dict[int, float]] = {}
    for point, sign in ((("1",), 1), (("5",), -1)):
        values["tiny", point, "r1"] = {seed: 10.0 + seed for seed in study.seeds}
        values["prox", point, "r1"] = {seed: 10.0 + seed + sign * (2 + seed / 10) for seed in study.seeds}
    labels = [f"{row}, {label}, seed {k}" for k in range(5) for row in ("tiny", "prox") for label in "15"][:runs]
    results = Results(study, values, cells={label: label for label in labels}, code=("0.1.0 abc",))
    return StudyRecord("creamfl/t1", "small", results)


def test_a_papers_section_has_claims_and_maps_with_their_pictures() -> None:
    assert evidence_section([], "../results") == "None of its own studies was run yet.\n"
    own = record()
    text = evidence_section([own], "../results")
    assert "| prox > tiny on r1 at 5 | Table 1 | contradicted | 5 | -2.20 |" in text
    assert "![prox > tiny on r1](../results/papers-creamfl-t1-small-map-1.svg)" in text
    assert "held at 1 of 2 points (pairs 1)" in text
    assert "[creamfl/t1](../results/papers-creamfl-t1-small.md)" in text
    assert list(record_pictures(own)) == ["papers-creamfl-t1-small-map-1.svg"]
    assert record_pictures(own) == record_pictures(own)
    page = record_text(own)
    assert "](papers-creamfl-t1-small-map-1.svg)" in page
    assert "| code | 0.1.0 abc |" in page


def test_items_are_in_the_order_of_the_paper() -> None:
    names = ["Figure 10", "Section 3", "Table 2", "Figure 9", "Table 11"]
    own = papers_own("Tiny", [record(name) for name in names])
    assert [one.item_name for one in own] == ["Table 2", "Table 11", "Figure 9", "Figure 10", "Section 3"]


def test_how_much_was_run() -> None:
    part, whole = record(runs=9), record()
    assert (part.progress, part.state) == ("9 of 20: in part", "in part: 1 held, 1 contradicted")
    assert (whole.progress, whole.state) == ("20 of 20", "1 held, 1 contradicted")
    assert part.digest != whole.digest


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("polyfed/demo", "10 (+10)"),  # two rows on five seeds, each of which tries five candidates at most
        ("fedaid/t16", "15 (+18)"),  # rows that are one run count once: 15 rows are three runs
        ("fedcola/t3", "25 (+45)"),
    ],
)
def test_runs_that_a_study_takes(name: str, runs: str) -> None:
    assert StudyRecord(name, "small", Results(Study.load(study_records.STUDIES[name]), {})).runs == runs


def test_a_study_whose_search_alone_was_run_has_no_record(tmp_path: Path) -> None:
    Results(Study.load(study_records.STUDIES["polyfed/demo"]), {}).save(tmp_path / "demo-small")
    assert study_records.records(tmp_path) == []
