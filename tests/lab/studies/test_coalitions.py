"""One experiment with some of its groups at a time: who takes part, what is refused, and what is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from made_up_cells import made_up
from polyfed import Experiment
from polyfed.core.errors import ConfigError, DataError, RunError
from polyfed.lab.studies.coalitions import coalition_study, final_values, spreads_of
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.scaling import run_scaling, scaling_coalitions
from polyfed.runs.opened import open_run


def loaded(content: dict[str, Any], *overrides: str) -> Experiment:
    return Experiment.load(content, overrides)


def test_coalitions_are_cells_of_a_study_with_the_final_metric(three_groups: dict[str, Any], tmp_path: Path) -> None:
    coalitions = {"alone": ["paired"], "all": ["paired", "image", "text"]}
    study = coalition_study(loaded(three_groups, "run.sampling.cohort=3"), coalitions, [4], "who")
    values = final_values(study, tmp_path / "out")
    results = Results.load(tmp_path / "out")
    assert results.study.base_name == "tiny"
    runs = {row: open_run(tmp_path / "cells" / results.cells[f"{row}, seed 4"]) for row in coalitions}
    assert {row: list(run.experiment.clients) for row, run in runs.items()} == coalitions
    assert runs["alone"].experiment.run.sampling.cohort == 2  # of no more clients than there are
    for row, run in runs.items():
        assert values[row] == {4: run.records.series("server", "r1_sum")[run.experiment.run.rounds]}
    assert final_values(study, tmp_path / "other") == values  # the cells beside it


def test_a_run_that_fails_is_named(tiny: dict[str, Any], tmp_path: Path) -> None:
    # all items are public, so that nothing is left for the clients
    broken = loaded(tiny, "data.sources.scenes.train=12", "public.items=null")
    with pytest.raises(RunError, match=r"a, seed 0: .*; the same command goes on"):
        final_values(coalition_study(broken, {"a": ["paired"]}, [0], "who"), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "overrides", "seeds", "message"),
    [
        ({}, (), [], "seeds"),
        ({}, (), [1, 1], "has a seed twice"),
        ({"server": None}, (), [0], "has no server model"),
        ({"public": None}, ("algorithm=server_only",), [0], "row 'a': algorithm 'server_only' needs a public set"),
        ({}, ("run.engine={name: flower, superlink: '127.0.0.1:9091'}",), [0], "row 'a': run.engine is a deployment"),
    ],
)
def test_what_cannot_be_run_is_refused_before_any_run(
    tiny: dict[str, Any], tmp_path: Path, changes: dict, overrides: tuple[str, ...], seeds: list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        final_values(
            coalition_study(loaded(tiny | changes, *overrides), {"a": ["paired"]}, seeds, "who"), tmp_path / "out"
        )
    assert not list(tmp_path.iterdir())


def test_data_that_are_not_there_are_refused_before_any_run(tiny: dict[str, Any], tmp_path: Path) -> None:
    tiny["data"] |= {"dir": str(tmp_path / "none")}
    tiny["data"]["sources"]["private"] = {"name": "parquet", "path": "pairs", "columns": {"image": "image"}}
    with pytest.raises(DataError, match="pairs"):
        final_values(coalition_study(loaded(tiny), {"a": ["image"]}, [0], "who"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


# ---- scaling


def test_groups_join_step_by_step(three_groups: dict[str, Any]) -> None:
    assert scaling_coalitions(loaded(three_groups), [["text"], ["image"]]) == {
        "0-none": ["paired"],
        "1-text": ["paired", "text"],
        "2-image": ["paired", "image", "text"],
    }
    assert list(scaling_coalitions(loaded(three_groups), [["text", "image"]])) == ["0-none", "1-text+image"]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([["text"], []], "step 2 names no group"),
        ([["text"], ["image", "text"]], "'text' is named 2 times"),
        ([["sound"]], "no group 'sound'"),
        ([], "groups names no group"),
        ([["paired", "image", "text"]], "no client is left"),
    ],
)
def test_steps_that_cannot_be(three_groups: dict[str, Any], steps: list[list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scaling_coalitions(loaded(three_groups), steps)


def test_scaling_runs_every_step(three_groups: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.lab.studies.coalitions.run_study", made_up)
    found = run_scaling(loaded(three_groups), [["text"]], [0, 1], tmp_path / "out")
    assert list(found.values) == ["0-none", "1-text"]
    assert [spread.mean for spread in spreads_of(found.values).values()] == [
        sum(by_seed.values()) / 2 for by_seed in found.values.values()
    ]
    assert found.to_json()["values"]["0-none"]["std"] != found.to_json()["values"]["0-none"]["mean"]
    assert found.to_json()["steps"] == (("text",),)
