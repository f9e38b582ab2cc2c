"""Which cells a study has: resolved settings, shared cells, and choices on validation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyfed.core.errors import ConfigError
from polyfed.lab.studies.cells import Cell, CellFigures, Places, resolve
from polyfed.lab.studies.planning import StudyPlan
from polyfed.lab.studies.study import Study
from polyfed.runs.config_files import read_config

Load = Callable[..., Study]
RATES = {
    "grid": {"rate": [0.1, 0.2, 0.4]},
    "paths": {"rate": ["clients.*.training.optimizer.lr"]},
    "set": {"run.rounds": 2},
    "final": {"run.rounds": 3},
    "seeds": [7, 8],
    "column": {"metric": "r1_sum", "kind": "validation", "round": "best"},
}


def planned(study: Study, store: Path, places: Places | None = None) -> StudyPlan:
    return StudyPlan(study, places or Places(), store)


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
        (
            {"set": {"clients.paired.*.lr": 3, "data.none.*": 1}},
            "row 'a': data.none.*: there is nothing at 'data.none'",
        ),
        ({"groups": ["texts"]}, "row 'a': groups: no group 'texts'"),
        ({"base": "nothing"}, "row 'a': no preset or file 'nothing'"),
        ({"set": {"algorithm": "server_only"}, "twin": "local"}, "row 'a': twin.kind is local, but"),
    ],
)
def test_wrong_rows_are_named(loaded: Load, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(loaded(rows={"a": row}), "a", (), Places())


def test_equal_runs_share_a_cell_whatever_their_names_and_places(loaded: Load, tmp_path: Path) -> None:
    rows = {
        "one": {},
        "same": {"set": {"description": "x", "run.state_memory": 5}},
        "other": {"set": {"run.rounds": 2}},
    }
    study = loaded(rows=rows)
    plans = [planned(study, tmp_path, places) for places in (Places(), Places(data_dir=tmp_path, engine="ray"))]
    digests = [{row: plan.final(row, ())[0].digest for row in rows} for plan in plans]
    assert digests[0] == digests[1]
    assert digests[0]["one"] == digests[0]["same"] != digests[0]["other"]
    first, second = plans[0].final("one", ())
    assert first.digest != second.digest
    attacked = planned(study, tmp_path, Places(engine="lab.studies.study_columns.Elsewhere")).final("one", ())[0]
    assert attacked.digest != first.digest  # an engine of somebody's own may change figures


def test_other_data_of_the_same_name_make_another_cell(loaded: Load, tmp_path: Path) -> None:
    source = {"name": "parquet", "path": "pairs", "columns": {"image": "image", "text": "text"}}
    study = loaded(rows={"a": {"set": {"data.sources.scenes": source}}})
    for folder, text in (("one", "a"), ("same", "a"), ("other", "bb")):
        (tmp_path / folder / "pairs").mkdir(parents=True)
        (tmp_path / folder / "pairs" / "train.parquet").write_text(text)
    digests = {
        folder: planned(study, tmp_path, Places(data_dir=tmp_path / folder)).final("a", ())[0].digest
        for folder in ("one", "same", "other")
    }
    assert digests["one"] == digests["same"] != digests["other"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tuning": RATES | {"column": {"metric": "r1_summ", "kind": "validation"}}},
            "tuning.column.metric: the server's task has no 'r1_summ'; did you mean 'r1_sum'",
        ),
        ({"columns": {"r": "r1_summ"}}, "rows.tiny.columns.r.metric: the server's task has no 'r1_summ'"),
        ({"columns": {"r": {"metric": "r1_sum", "of": "pared"}}}, "rows.tiny.columns.r.of: no group 'pared'"),
    ],
)
def test_columns_that_no_run_can_have_are_refused_before_any_runs(
    loaded: Load, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(loaded(**changes), tmp_path).check("tiny", ())


def test_where_no_candidate_has_a_figure_nothing_is_chosen(loaded: Load, tmp_path: Path) -> None:
    plan = planned(loaded(rows={"a": {}}, tuning=RATES | {"seeds": [7]}), tmp_path)
    for cell in plan.search("a", ()):
        complete(cell, tmp_path, {rates_column(plan.study): "nobody has it"})
    with pytest.raises(LookupError, match="no candidate of row 'a' has a figure"):
        plan.chosen("a", ())


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
        return planned(study, tmp_path).final("ours", ())[0].digest

    first = digest()
    (tmp_path / "others.py").write_text("x = 2\n")
    assert digest() == first  # it does not import this
    for file in ("ours.py", "parts.py"):
        before, path = digest(), package / file
        path.write_text(path.read_text() + "# edited\n")
        assert digest() != before


def test_an_edited_column_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyfed.lab.studies.column import ColumnSettings

    path = tmp_path / "mycolumns.py"
    path.write_text(
        "from polyfed.lab.studies.column import ColumnSettings\n\n\nclass One(ColumnSettings):\n"
        "    def measure(self, run):\n        return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    column = ColumnSettings.model_validate({"name": "mycolumns.One"})
    before = column.digest
    path.write_text(path.read_text().replace("1.0", "2.0"))
    assert column.digest != before


def test_a_row_is_tuned_on_the_mean_over_seeds_of_its_own(loaded: Load, tmp_path: Path) -> None:
    study = loaded(rows={"a": {}, "plain": {"tune": False}}, tuning=RATES)
    plan = planned(study, tmp_path)
    assert plan.search("plain", ()) == []
    assert [cell.experiment.run.rounds for cell in plan.final("plain", ())] == [1, 1]
    cells = plan.search("a", ())
    assert [(cell.purpose, cell.seed) for cell in cells[:3]] == [("rate=0.1", 7), ("rate=0.1", 8), ("rate=0.2", 7)]
    assert {cell.experiment.run.rounds for cell in cells} == {2}
    digest = rates_column(study)
    for cell, value in zip(cells, [1.0, 9.0, 6.0, 6.0, 11.0], strict=False):
        complete(cell, tmp_path, {digest: value})
    with pytest.raises(LookupError):  # the last candidate's second seed
        plan.chosen("a", ())
    complete(cells[-1], tmp_path, {digest: float("nan")})
    chosen = plan.chosen("a", ())
    assert chosen is not None
    assert (chosen.values, chosen.is_at_end) == ({"rate": 0.2}, False)  # a candidate that diverged once is out
    assert chosen.scores["rate=0.1"] == 5.0
    (final, _) = plan.final("a", ())
    assert final.experiment.run.rounds == 3
    assert {group.training.optimizer.lr for group in final.experiment.clients.values()} == {0.2}
    assert plan.columns(cells[0]) == [study.tuning.column]  # type: ignore[union-attr]


def rates_column(study: Study) -> str:
    assert study.tuning is not None
    return study.tuning.column.digest


def test_a_figure_that_could_not_be_had_is_no_choice(loaded: Load, tmp_path: Path) -> None:
    plan = planned(loaded(rows={"a": {}}, tuning=RATES | {"seeds": [7]}), tmp_path)
    for cell, value in zip(plan.search("a", ()), [3.0, "nobody has it", 2.0], strict=True):
        complete(cell, tmp_path, {rates_column(plan.study): value})
    with pytest.raises(LookupError):  # the grid goes on below its lowest value, as that of a twin
        plan.chosen("a", ())
    for rate, value in ((0.05, 4.0), (0.025, 5.0)):
        assert plan.search("a", ())[-1].purpose == f"rate={rate}"
        complete(plan.search("a", ())[-1], tmp_path, {rates_column(plan.study): value})
    chosen = plan.chosen("a", ())
    assert chosen is not None
    assert (chosen.values, chosen.is_at_end) == ({"rate": 0.025}, True)  # two steps beyond it ends


def test_a_complete_cell_whose_configuration_was_edited_is_refused(loaded: Load, tmp_path: Path) -> None:
    from polyfed.core.errors import RunError

    plan = planned(loaded(), tmp_path)
    cell = plan.final("tiny", ())[0]
    assert CellFigures.of(cell.folder(tmp_path)) is None
    complete(cell, tmp_path, {"x": 1.0})
    assert CellFigures.of(cell.folder(tmp_path)) is not None
    (cell.folder(tmp_path) / "config.yaml").write_text("edited")
    with pytest.raises(RunError, match="was edited after the run; delete the folder"):
        CellFigures.of(cell.folder(tmp_path))


def test_every_row_of_the_example_in_the_documentation_resolves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "write-a-study.md"
    (tmp_path / "mine.yaml").write_text(page.read_text().split("```yaml\n")[1].split("```")[0])
    content = read_config("scenes-demo") | {"name": "shop"}
    content["clients"]["paired"] = content["clients"].get("paired") or next(iter(content["clients"].values()))
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "mymethods").mkdir()
    (tmp_path / "mymethods" / "ours.py").write_text(
        "from polyfed.algorithms.creamfl import CreamFL\n\n\nclass Ours(CreamFL):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mymethods", raising=False)
    study = Study.load(tmp_path / "mine.yaml")
    plan = planned(study, tmp_path)
    for row, point in plan.row_points():
        method = plan.check(row, point).algorithm.component_name()
        assert method in (row, "server_only", "mymethods.ours.Ours")
    assert len({cell.digest for row, point in plan.row_points() for cell in plan.search(row, point)}) > 5
