from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from polyfed import Experiment
from polyfed.analysis.scaling import run_scaling, scaling_experiments
from polyfed.analysis.series import Trial, final_values, planned_trials, spreads_of
from polyfed.core.errors import ConfigError, RunError
from polyfed.runs.folder import RunFolder


def loaded(content: dict[str, Any], *overrides: str) -> Experiment:
    return Experiment.load(content, overrides)


def test_folders_are_called_after_label_and_seed(tiny: dict[str, Any], tmp_path: Path) -> None:
    trials = planned_trials({"a": loaded(tiny), "b": loaded(tiny)}, [3, 1], tmp_path)
    assert [(t.label, t.seed, t.folder.name) for t in trials] == [
        ("a", 3, "a-seed3"),
        ("a", 1, "a-seed1"),
        ("b", 3, "b-seed3"),
        ("b", 1, "b-seed1"),
    ]


def test_a_run_is_started_continued_and_then_complete(tiny: dict[str, Any], tmp_path: Path) -> None:
    (trial,), lines = planned_trials({"a": loaded(tiny)}, [0], tmp_path), list[str]()
    values = final_values([trial], lines.append)
    where = "run 1 of 1: a, seed 0: "
    assert lines[0] == f"{where}started; watch it with: polyfed watch {trial.folder}"
    assert lines[1] == f"{where}r1_sum {values['a'][0]:.2f}"
    assert (trial.folder / "progress.jsonl").is_file()
    for file in (trial.folder / "checkpoints").glob("round-000002.*"):
        file.unlink()
    assert trial.begun
    assert not trial.complete
    assert final_values([trial], lines.append) == values
    assert trial.complete
    assert lines[2].startswith(f"{where}continued")
    final_values([trial], lines.append)
    assert lines[-1] == f"{lines[1]} (was complete)"


def test_a_folder_with_other_settings_is_refused(tiny: dict[str, Any], tmp_path: Path) -> None:
    (trial,) = planned_trials({"a": loaded(tiny)}, [0], tmp_path)
    trial.folder.mkdir()
    RunFolder(trial.folder).begin("x", trial.experiment.to_yaml(), {}, {})
    assert planned_trials({"a": loaded(tiny)}, [0], tmp_path)
    with pytest.raises(ConfigError, match="holds a run with other settings than 'a', seed 0; choose another --out"):
        planned_trials({"a": loaded(tiny, "run.rounds=9")}, [0], tmp_path)


def test_a_folder_with_something_else_is_refused(tiny: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "b-seed0").mkdir()
    (tmp_path / "b-seed0" / "letter.txt").touch()
    with pytest.raises(RunError, match="is not empty"):
        planned_trials({"a": loaded(tiny), "b": loaded(tiny)}, [0], tmp_path)
    assert not (tmp_path / "a-seed0").exists()


@pytest.mark.parametrize(
    ("changes", "overrides", "seeds", "message"),
    [
        ({}, (), [], "must be different numbers from 0 on"),
        ({}, (), [1, 1], "must be different numbers from 0 on"),
        ({}, (), [-1], "must be different numbers from 0 on"),
        ({}, ("run.sampling.cohort=4",), [0], r"'a': run.sampling.cohort is 4, but there are 3 clients"),
        ({"server": None}, (), [0], "has no server model"),
        ({"public": None}, ("algorithm=server_only",), [0], "needs a public set"),
        ({}, ("run.engine={name: flower, superlink: '127.0.0.1:9091'}",), [0], "is a deployment"),
    ],
)
def test_what_cannot_be_run_is_refused_before_any_run(
    tiny: dict[str, Any], tmp_path: Path, changes: dict, overrides: tuple[str, ...], seeds: list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned_trials({"good": loaded(tiny), "a": loaded(tiny | changes, *overrides)}, seeds, tmp_path)
    assert not list(tmp_path.glob("*-seed*"))


def test_a_run_without_its_final_metric(tiny: dict[str, Any], tmp_path: Path, tiny_run: Path) -> None:
    folder = shutil.copytree(tiny_run, tmp_path / "copy")
    trial = Trial("a", loaded(tiny, "run.rounds=1"), folder)
    assert trial.complete
    lines = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if json.loads(line)["round"] == 0]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError, match="has no test r1_sum of round 1"):
        trial.final()


# ---- scaling


def test_groups_join_step_by_step(three_groups: dict[str, Any]) -> None:
    found = scaling_experiments(loaded(three_groups), [["text"], ["image"]])
    assert {label: list(one.clients) for label, one in found.items()} == {
        "0-none": ["paired"],
        "1-text": ["paired", "text"],
        "2-image": ["paired", "image", "text"],
    }
    assert list(scaling_experiments(loaded(three_groups), [["text", "image"]])) == ["0-none", "1-text+image"]


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
        scaling_experiments(loaded(three_groups), steps)


def test_scaling_runs_every_step(three_groups: dict[str, Any], tmp_path: Path, started: list[str]) -> None:
    found = run_scaling(loaded(three_groups), [["text"]], [0], tmp_path)
    assert started == ["0-none-seed0", "1-text-seed0"]
    assert [spread.mean for spread in spreads_of(found.values).values()] == [
        found.values["0-none"][0],
        found.values["1-text"][0],
    ]
    assert found.to_json()["values"]["0-none"]["std"] != found.to_json()["values"]["0-none"]["mean"]
    assert found.to_json()["steps"] == (("text",),)
