"""Records on pages: claims that hold, and the runs of a paper."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pages
from lab.studies.conftest import tiny_study
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from small_federations import tiny_experiment
from study_records import Again, StudyRecord, place, record_text

AXES = {"pairs": {"setting": "run.seed", "values": [1, 5]}}


def record(item: str = "Table 1", runs: int = 20, digests: str = "", **more: Any) -> StudyRecord:
    """``prox`` is above ``tiny`` by about 2 at the first point, and below it by as much at the second."""
    settings = {
        "base": tiny_experiment(), "seeds": 5, "axes": AXES, "source": {"paper": "Tiny", "item": item},
        "claims": {"method": ["prox > tiny on r1 at 1", "prox > tiny on r1 at 5"]},
        "figures": [{"map": "prox > tiny on r1", "x": "pairs"}],
    }  # fmt: skip
    study = Study.model_validate(tiny_study(**(settings | more)))
    values: dict[tuple[str, tuple[str, ...], str], dict[int, float]] = {}
    for point, sign in ((("1",), 1), (("5",), -1)):
        values["tiny", point, "r1"] = {seed: 10.0 + seed for seed in study.seeds}
        values["prox", point, "r1"] = {seed: 10.0 + seed + sign * (2 + seed / 10) for seed in study.seeds}
    labels = [f"{row}, {label}, seed {k}" for k in range(5) for row in ("tiny", "prox") for label in "15"][:runs]
    code = {row: ["0.1.0 abc"] for row in study.rows}
    results = Results(study, values, cells={label: digests + label for label in labels}, code=code)
    again = {row: Again(f"{row}, 1, seed 0", "0.1.0 abc") for row in study.rows}
    return StudyRecord("creamfl/t1", "small", results, again)


def test_a_record_on_a_page() -> None:
    own = record()
    assert own.heading == "Table 1: tiny"
    assert [line.partition(" (")[0] for line in own.claims] == [
        "method, above: prox > tiny on r1 at 1: +2.20",
        "method, below: prox > tiny on r1 at 5: -2.20",
    ]
    assert own.table == "|r1|1|5|\n|-|-:|-:|\n|tiny|12.00±1.58|12.00±1.58|\n|prox|14.20±1.74|9.80±1.42|"
    assert [own.picture_file(one) for one in own.pictures] == ["pictures/t1-map-1.svg"]
    assert own.tuned == ""


def test_a_row_whose_cell_was_not_run_again_is_marked_and_decides_nothing() -> None:
    own = record()
    again = {**own.again, "prox": replace(own.again["prox"], distance=0.2)}
    assert "|prox≈|" in replace(own, again=again).table
    assert replace(own, again=again).state == "1 seen, 1 not seen here"
    read = replace(own.results, withheld={"prox": "not run again"})
    own = replace(own, results=read, again={"tiny": own.again["tiny"]})
    assert {item.in_words for item in own.judgements} == {"undecided (not run again)"}
    assert replace(own, again={"prox": Again("prox, 1, seed 0", "", 0.31)}).hidden == ["prox"]


def test_without_axes_the_last_column_is_the_difference_of_what_is_claimed() -> None:
    study = Study.model_validate(tiny_study(base=tiny_experiment(), seeds=5, claims={"method": ["prox > tiny on r1"]}))
    by_seed = {seed: 10.0 + seed for seed in study.seeds}
    values = {("tiny", (), "r1"): by_seed, ("prox", (), "r1"): {seed: 1.1 * value for seed, value in by_seed.items()}}
    assert StudyRecord("creamfl/t1", "small", Results(study, values)).table == (
        "||r1|r1 minus tiny|\n|-|-:|-:|\n|tiny°|12.00±1.58||\n|prox°|13.20±1.74|+1.2 (+1.0 to +1.4)|"
    )


def test_gauges_stand_beneath_the_table() -> None:
    gauge = {"name": "gauge", "shows": "r1_sum", "reads": "points", "below": 10, "then": "it cannot act"}
    study = Study.model_validate(tiny_study(base=tiny_experiment(), columns={"r1": "r1_sum", "acts": gauge}))
    values = {(row, (), "acts"): {0: value, 1: value} for row, value in {"tiny": 12.0, "prox": 9.96}.items()}
    own = StudyRecord("creamfl/t1", "small", Results(study, values, replies={"tiny": [0, 0], "prox": [2, 1]}))
    assert own.gauges == [
        "acts (points; from 10 down it cannot act): tiny 12.0±0.0, prox **10.0±0.0**",
        "replies shortened / left out, over all seeds: prox 2 / 1, no other",
    ]


def test_a_record_has_a_figure_a_line() -> None:
    text = record_text(record().results)
    assert '\n{"row": "tiny", "point": ["1"], "column": "r1", "by_seed": {"0": 10.0, "1": 11.0, ' in text
    assert json.loads(text) == {"study": json.loads(json.dumps(record().study.content())), **record().results.to_json()}


def test_items_are_in_the_order_of_the_paper() -> None:
    names = ["Figure 10", "Section 3", "Table 2", "Figure 9", "Table 11"]
    own = sorted((record(name).study for name in names), key=place)
    assert [study.source.item for study in own if study.source] == names[2::2] + names[3::-3] + names[1:2]


def test_how_much_was_run() -> None:
    counts = [(own.runs, own.state) for own in (record(runs=9), record())]
    assert counts == [(9, "in part: 1 seen, 1 not seen here"), (20, "1 seen, 1 not seen here")]
    apart = record(claims={"part": ["prox > tiny on r1 at 1"], "setting": ["prox > tiny on r1 at 5"]})
    assert (apart.state, record(claims={}).state) == ("1 seen; on settings 1 not seen here", "run")


def test_claims_on_methods_and_parts_count_once_where_items_share_runs() -> None:
    # the first shows it as well
    same = {"part": ["tiny < prox on r1 at 1"], "setting": ["tiny at 5 > tiny at 1 on r1"]}
    asked = record(source=None, claims={"setting": ["prox < tiny on r1 at 5"]})
    others = record("Table 2", claims=same), record("Table 3", digests="of other runs ", claims=same), asked
    counts = pages.counted([record(), *others])
    assert counts["creamfl"] == {"seen": 2, "not seen here": 1, "setting not seen here": 2}
    assert counts["polyfed"] == {"setting seen": 1}
    assert [pages.of_settings(counts[paper]) for paper in ("creamfl", "fedcola")] == ["0 of 2 seen", ""]
