"""Study files: their content by scale, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.studies.conftest import tiny_study
from polyfed.core.errors import ConfigError
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from polyfed.lab.studies.study_files import study_content

HOLDINGS = {"name": "holdings", "of": "paired"}
ALPHA = {"alpha": {"setting": "run.seed", "values": [0.1, 5]}}
RATE = {"paths": ["clients.*.training.optimizer.lr"]}
TUNING = {"settings": {"rate": RATE}, "column": {"metric": "r1", "kind": "validation"}}


def with_rate(**settings: Any) -> dict[str, Any]:
    return {"tuning": TUNING | {"settings": {"rate": RATE | settings}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": [1, 1]}, r"seeds: \[1, 1\] has a seed twice"),
        ({"rows": {}}, "rows: "),
        ({"rows": {"a": {"like": "b"}, "b": {}}}, "rows.a.like: unknown 'b'; valid: none"),
        ({"rows": {"a": {"only": {"beta": [1]}}}}, "rows.a.only: unknown 'beta'"),
        ({"rows": {"a": {"only": {"alpha": [7]}}}, "axes": ALPHA}, "unknown '7'; .*valid: 0.1, 5"),
        ({"rows": {"a": {"twin": "alone"}}}, "rows.a.twin.kind: .*'server-only'.*alone"),
        ({"axes": {"x": {"setting": "run.seed"}}}, "axes.x: give 'setting' with 'values', or 'points'"),
        ({"columns": {"x": {"name": "nothing"}}}, "unknown column 'nothing'"),
        ({"columns": {"x": {"name": "metric"}}}, "columns.x.metric: is required"),
        ({"columns": {"x": {"each": {"k": [1, 2]}}}}, "'x': each.k: the name is not unique; write {k} into it"),
        ({"columns": {"x": HOLDINGS | {"column": "edema"}}}, "column and value: give both, or neither"),
        ({"columns": {"x": HOLDINGS | {"column": "edema", "value": "1", "label": "2"}}}, "give one of them"),
        ({"columns": {"x": {"name": "client_traffic", "groups": []}}}, "groups"),
        ({"rows": {"a": {"columns": {"r2": {"of": "paired"}}}}}, "rows.a.columns: unknown 'r2'; valid: MiB, r1"),
        ({"rows": {"a": {"columns": {"r1": {"off": "paired"}}}}}, "rows.a.columns.r1: .*key 'off'; did you mean 'of'"),
        ({"rows": {"a": {"columns": {"MiB": {"per": "day"}}}}}, "rows.a.columns.MiB: per"),
        ({"against": "b"}, "against: unknown 'b'"),
        ({"printed": {"tiny": {"r2": 1}}}, "printed.tiny: unknown 'r2'; valid: MiB, r1"),
        ({"printed": {"tiny": {"r1": {"0.3": 1}}}, "axes": ALPHA}, "printed.tiny.r1: unknown '0.3'"),
        ({"figures": [{"column": "r9"}]}, "figures.0.column: unknown 'r9'"),
        ({"figures": [{"column": "r1", "over": "beta"}]}, "figures.0.over: unknown 'beta'"),
        ({"figures": [{"column": "r1", "over": "round", "minus": True}]}, "figures.0.over: .*'round'; valid: rows"),
        ({"tuning": TUNING | {"seeds": [0]}}, "tuning: unknown key 'seeds'"),
        ({"tuning": TUNING | {"table": "t1"}}, "tuning: give 'settings' with 'column', or 'table'"),
        ({"tuning": {"settings": {"rate": RATE}}}, "tuning: give 'settings' with 'column', or 'table'"),
        (
            {"claims": {"more_seeds": 5, "part": ["tiny > prox on r1"]}},
            "more_seeds: 2 seeds decide nothing; give seeds: 5",
        ),
        ({"tuning": TUNING | {"column": {"metric": "r1"}}}, "kind is test, but a choice is made on validation"),
        ({"tuning": TUNING | {"grid": {"rate": [0.1]}}}, "tuning: unknown key 'grid'"),
        ({"tuning": TUNING | {"set": {"run.rounds": 2}}}, "candidates have the rounds of the table"),
        (with_rate(factors=[2, 4]), "must ascend and contain 1"),
        (with_rate(factors=[2, 1]), "must ascend and contain 1"),
        ({"rows": {"a": {"tune": "b"}}, "tuning": TUNING}, "rows.a.tune: 'b' names a row of a main table"),
        (with_rate(rows=["b"]), "tuning.settings.rate.rows: unknown 'b'; valid: prox, tiny"),
    ],
)
def test_refusals_name_the_key(loaded: Callable[..., Study], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(**change)


def test_scales_are_merged_over_the_file(study_file: Callable[..., Path]) -> None:
    paper = {"base": "scenes-demo", "seeds": 5, "rows": {"prox": None}, "tuning": None}
    path = study_file(tiny_study(tuning=TUNING, scales={"small": {"seeds": 3}, "paper": paper}))
    small, large = Study.load(path), Study.load(path, "paper")
    assert (small.seeds, list(small.rows), small.base) == ([0, 1, 2], ["tiny", "prox"], str(path.parent / "tiny.yaml"))
    assert (large.seeds, list(large.rows), large.base, large.tuning) == ([0, 1, 2, 3, 4], ["tiny"], "scenes-demo", None)
    with pytest.raises(ConfigError, match="--scale huge: valid: paper, small, smoke"):
        Study.load(path, "huge")


def test_smoke_is_one_seed_one_round_and_the_first_labels(study_file: Callable[..., Path]) -> None:
    rows = {"tiny": {}, "late": {"only": {"alpha": [5]}}, "early": {"only": {"alpha": [0.1]}}}
    claims = {"method": ["tiny > early on r1 at 0.1"]}
    content = tiny_study(rows=rows, axes=ALPHA, tuning=TUNING, seeds=4, claims=claims)
    smoke = Study.load(study_file(content | {"scales": {"smoke": {"set": {"public.items": 4}}}}), "smoke")
    assert (smoke.seeds, list(smoke.rows), smoke.points, smoke.tuning) == ([0], ["tiny", "early"], (("0.1",),), None)
    assert smoke.set == {"run.rounds": 1, "public.items": 4}


def test_labels_points_and_rows_that_are_like_others(loaded: Callable[..., Study]) -> None:
    rows = {
        "a": {"groups": ["paired"], "set": {"run.rounds": 3, "run.seed": 1}},
        "b": {"like": "a", "set": {"run.rounds": 4}, "twin": "no-private"},
        "c": {"like": "b", "only": {"alpha": ["5"]}, "groups": None},
    }
    axes = ALPHA | {"clients": {"points": {3: {"clients.image.count": 3}}}}
    study = loaded(rows=rows, axes=axes, printed={"a": {"r1": {"0.1, 3": 7}}})
    assert study.points == (("0.1", "3"), ("5", "3"))
    assert study.overrides_at(("5", "3")) == {"run.seed": 5, "clients.image.count": 3}
    assert study.points_of("c") == (("5", "3"),)
    row = study.resolved("c")
    assert (row.groups, row.set) == (None, {"run.rounds": 4, "run.seed": 1})
    assert row.twin.kind == "no-private"
    assert (study.printed_at("a", "r1", ("0.1", "3")), study.printed_at("a", "r1", ("5", "3"))) == (7, None)


def test_a_row_changes_all_columns_but_those_that_it_names(loaded: Callable[..., Study]) -> None:
    columns = {name: {"metric": "r1_sum", "of": "image"} for name in ("a", "b", "c")}
    rows = {"x": {}, "y": {"columns": {"*": {"of": "text"}, "b": {"of": "paired"}, "c": None}}}
    study = loaded(columns=columns, rows=rows)
    of = {row: {name: column.of for name, column in study.columns_of(row).items()} for row in rows}
    assert of == {"x": dict.fromkeys("abc", "image"), "y": {"a": "text", "b": "paired"}}


def test_rows_that_are_like_others_stay_so_with_other_seeds_and_from_a_folder(
    loaded: Callable[..., Study], tmp_path: Path
) -> None:
    first = {"groups": ["paired"], "only": {"alpha": [5]}, "main": False, "tune": False}
    rows = {"a": first, "b": {"like": "a", "set": {"run.rounds": 4}}}
    study = loaded(rows=rows, axes=ALPHA)
    Results(study, {}).save(tmp_path)
    for other in (study.with_seeds([7]), Results.load(tmp_path).study):
        assert [other.resolved(name) for name in rows] == [study.resolved(name) for name in rows]
        assert other.points_of("b") == study.points_of("b") == (("5",),)


def test_a_file_extends_another(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tiny_study(seeds=1)))
    (tmp_path / "two.yaml").write_text("{extends: one, title: two, rows: {prox: null, more: {}}}")
    assert Study.load(tmp_path / "two.yaml").title == "two"
    assert list(study_content(tmp_path / "two.yaml")["rows"]) == ["tiny", "more"]
    (tmp_path / "one.yaml").write_text("extends: two")
    with pytest.raises(ConfigError, match="extends itself"):
        study_content(tmp_path / "two.yaml")


def test_the_main_table_is_read_at_the_scale_of_its_study(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tiny_study(tuning={"table": "main"}, scales={"paper": {}})))
    (tmp_path / "main.yaml").write_text(yaml.safe_dump(tiny_study(tuning=TUNING)))
    tunings = [Study.load(tmp_path / "one.yaml", scale).tuning for scale in ("small", "paper")]
    main = str(tmp_path / "main.yaml")
    assert [(one.table, one.scale) for one in tunings if one] == [(main, "small"), (main, "paper")]


def test_what_is_taken_away_takes_its_figures_with_it(tmp_path: Path) -> None:
    printed = {"tiny": {"r1": 1, "MiB": 2}, "prox": {"r1": 3}}
    settings = {"rate": RATE, "weight": {"paths": ["algorithm.distiller.weight"]}}
    one = tiny_study(printed=printed, tuning=TUNING | {"settings": settings})
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(one))
    over = {"rows": {"prox": None}, "columns": {"MiB": None}, "tuning": {"settings": {"weight": None}}}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({"extends": "one", "scales": {"paper": {"tuning": None}}} | over))
    study = Study.load(tmp_path / "two.yaml")
    assert (list(study.rows), list(study.columns), study.printed) == (["tiny"], ["r1"], {"tiny": {"r1": 1}})
    assert list(study.tuning.settings) == ["rate"]
    assert Study.load(tmp_path / "two.yaml", "paper").tuning is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "no study file 'nothing'"),
        ("a.yaml", "cannot read study"),
        ("b.yaml", "must be a mapping"),
        ("c.yaml", "c.yaml: extends: no study file 'demo'; studies of papers are files"),
    ],
)
def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.yaml").write_text("- 1")
    (tmp_path / "c.yaml").write_text("extends: demo")
    with pytest.raises(ConfigError, match=message):
        Study.load(name)


def test_a_matrix_is_the_columns_and_rows_that_it_stands_for(loaded: Callable[..., Study]) -> None:
    kinds = {"A": "paired", "all": "clients"}
    matrix = {"each": {"k": [1, 5], "who": kinds}, "metric": "image_to_text_r@{k}", "of": "{who}"}
    row = {"each": {"n": [1, 2]}, "set": {"run.rounds": "{n}"}, "columns": {"{k} {who}": matrix | {"over": "worst"}}}
    study = loaded(columns={"{k} {who}": matrix}, rows={"rounds {n}": row})
    assert list(study.columns) == ["1 A", "1 all", "5 A", "5 all"]
    last = study.columns["5 all"].model_dump(mode="json")
    assert (last["metric"], last["of"]) == ("image_to_text_r@5", "clients")
    assert {name: row.set for name, row in study.rows.items()} == {f"rounds {n}": {"run.rounds": n} for n in (1, 2)}
    assert {column.over for column in study.columns_of("rounds 2").values()} == {"worst"}  # type: ignore[attr-defined]
