"""Which cells a study has: resolved settings, shared cells, and choices on validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from polyfed.core.errors import ConfigError, RunError
from polyfed.lab.studies.cells import Cell, CellFigures, Places, StudyPlan, resolve
from polyfed.lab.studies.study import Study

Load = Callable[..., Study]
RATES = {
    "settings": {"rate": {"paths": ["clients.*.training.optimizer.lr"]}},
    "candidates": 4,
    "column": {"metric": "r1_sum", "kind": "validation", "round": "best"},
}


def planned(study: Study, store: Path, positions: Places | None = None) -> StudyPlan:
    return StudyPlan(study, positions or Places(), store)


def complete(cell: Cell, store: Path, values: Mapping[str, float | str]) -> None:
    """Files of a complete cell."""
    folder = cell.folder(store)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(cell.label)
    CellFigures(values).save(folder)


def test_overrides_apply_in_order_and_stars_stand_for_what_is_there(loaded: Load) -> None:
    rows = {"a": {"set": {"run.rounds": 4, "run.eval_every": 2}}, "b": {"groups": ["paired"]}}
    axes = {"rounds": {"setting": "run.rounds", "values": [5]}}
    study = loaded(rows=rows, axes=axes, set={"run.rounds": 1, "run.eval_every": 3, "clients.*.training.batch_size": 5})
    experiment = resolve(study, "a", ("5",), Places(), {"run.state_memory": 9})
    assert (experiment.run.rounds, experiment.run.eval_every, experiment.run.state_memory) == (5, 2, 9)
    assert {group.training.batch_size for group in experiment.clients.values()} == {5}
    assert list(resolve(study, "b", ("5",), Places()).clients) == ["paired"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"set": {"run.round": 3}}, "row 'a': run: unknown key 'round'|row 'a': .*did you mean 'rounds'"),
        ({"set": {"clients.paired.*.lr": 3, "data.none.*": 1}}, "row 'a': data.none.*: 'data.none' is empty"),
        ({"groups": ["texts"]}, "row 'a': groups: no group 'texts'"),
        ({"base": "nothing"}, "row 'a': no preset or file 'nothing'"),
        ({"set": {"algorithm": "server_only"}, "twin": "local"}, "row 'a': twin.kind is local, but"),
    ],
)
def test_wrong_rows_are_named(loaded: Load, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(loaded(rows={"a": row}), "a", (), Places())


def test_equal_runs_share_a_cell_whatever_their_names_and_places(loaded: Load, tmp_path: Path) -> None:
    same = {"set": {"description": "x", "run.state_memory": 5, "data.device_memory": 6}}
    rows = {"one": {}, "same": same, "other": {"set": {"run.rounds": 2}}}
    study = loaded(rows=rows)
    plans = [planned(study, tmp_path, positions) for positions in (Places(), Places(data_dir=tmp_path, engine="ray"))]
    digests = [{row: plan.cell(row, (), 0).digest for row in rows} for plan in plans]
    assert digests[0] == digests[1]
    assert digests[0]["one"] == digests[0]["same"] != digests[0]["other"]
    first, second = (plans[0].cell("one", (), seed) for seed in (0, 1))
    assert first.digest != second.digest
    attacked = planned(study, tmp_path, Places(engine="lab.studies.study_columns.Elsewhere")).cell("one", (), 0)
    assert attacked.digest != first.digest  # an engine from outside may change figures


def test_a_setting_that_came_later_leaves_cells_of_before_their_names(loaded: Load, tmp_path: Path) -> None:
    plan = planned(loaded(rows={"a": {}, "later": {"set": {"public.reserve": 3}}}), tmp_path)
    assert "reserve" not in plan.cell("a", (), 0).settings["public"]
    assert plan.cell("later", (), 0).settings["public"]["reserve"] == 3


def test_other_data_of_the_same_name_make_another_cell(loaded: Load, tmp_path: Path) -> None:
    source = {"name": "parquet", "path": "pairs", "columns": {"image": "image", "text": "text"}}
    study = loaded(rows={"a": {"set": {"data.sources.scenes": source}}})
    for folder, text in (("one", "a"), ("same", "a"), ("other", "bb")):
        (tmp_path / folder / "pairs").mkdir(parents=True)
        (tmp_path / folder / "pairs" / "train.parquet").write_text(text)
    digests = {
        folder: planned(study, tmp_path, Places(data_dir=tmp_path / folder)).cell("a", (), 0).digest
        for folder in ("one", "same", "other")
    }
    assert digests["one"] == digests["same"] != digests["other"]


def of_clients(metric: str, **more: str) -> dict[str, Any]:
    return {"columns": {"r": {"metric": metric, "of": "clients"} | more}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tuning": RATES | {"column": {"metric": "r1_summ", "kind": "validation"}}},
            "tuning.column.metric: 'server' has no 'r1_summ'; did you mean 'r1_sum'.*; or give rows.tiny.tune: false",
        ),
        (
            {"tuning": RATES, "rows": {"tiny": {"set": {"server.validation_split": None}}}},
            "tuning.column.kind: validation, but server.validation_split is null",
        ),
        ({"columns": {"r": "r1_summ"}}, "rows.tiny.columns.r.metric: 'server' has no 'r1_summ'"),
        ({"columns": {"r": {"metric": "r1_sum", "of": "pared"}}}, "rows.tiny.columns.r.of: no group 'pared'"),
        (of_clients("r1_summ"), "rows.tiny.columns.r.metric: 'clients' has no 'r1_s"),
        (of_clients("r1_sum", kind="validation"), "kind: validation, but 'clients' is measured on test data alone"),
        (
            of_clients("r1_sum") | {"set": {"run.evaluate_clients": False}},
            "of: 'clients' is not measured, as run.evaluate_clients is false",
        ),
        ({"rows": {"tiny": {"twin": "local"}}}, "rows.tiny.columns.r1.of: the experiment has no server"),
    ],
)
def test_columns_that_no_run_can_have_are_refused_before_any_runs(
    loaded: Load, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(loaded(**changes), tmp_path).check("tiny", ())


def test_an_edited_method_makes_another_cell(loaded: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mymethods"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "ours.py").write_text(
        "from polyfed.algorithms.fedavg import FedAvg\nfrom . import parts\n\n\nclass Ours(FedAvg):\n    pass\n"
    )
    (package / "parts.py").write_text("FACTOR = 1\n")
    (tmp_path / "others.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    study = loaded(rows={"ours": {"set": {"algorithm": {"name": "mymethods.ours.Ours", "local_epochs": 1}}}})

    def digest() -> str:
        return planned(study, tmp_path).cell("ours", (), 0).digest

    first = digest()
    (tmp_path / "others.py").write_text("x = 2\n")
    assert digest() == first  # it does not import this
    for file in ("ours.py", "parts.py"):
        before, path = digest(), package / file
        path.write_text(path.read_text() + "# edited\n")
        assert digest() != before


def test_a_complete_cell_whose_configuration_was_edited_is_refused(loaded: Load, tmp_path: Path) -> None:
    cell = planned(loaded(), tmp_path).cell("tiny", (), 0)
    assert CellFigures.of(cell.folder(tmp_path)) is None
    complete(cell, tmp_path, {"x": 1.0})
    assert CellFigures.of(cell.folder(tmp_path)) is not None
    (cell.folder(tmp_path) / "config.yaml").write_text("edited")
    with pytest.raises(RunError, match="was edited after the run; delete the folder"):
        CellFigures.of(cell.folder(tmp_path))
