"""Runs: the same twice, complete after every round, and what happens when they are stopped."""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import polyfed
from misbehaving import contents, cut_short
from polyfed.core.errors import RunError
from polyfed.reporting.api import run
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from small_federations import Config

Contents = dict[str, bytes]
Stopped = Callable[[int], Path]


def test_the_same_configuration_gives_the_same_run(undisturbed: Path, complete: Contents, tmp_path: Path) -> None:
    assert contents(polyfed.run(Experiment.load(undisturbed / "config.yaml"), tmp_path / "b", quiet=True)) == complete


def test_an_interrupted_run_ends_in_the_bits_of_an_uninterrupted_one(stopped: Stopped, complete: Contents) -> None:
    assert contents(polyfed.resume(stopped(2), quiet=True)) == complete


@pytest.mark.parametrize("file", ["round-000002.safetensors", "clients/*/000002-*.safetensors"])
def test_a_damaged_checkpoint_falls_back_to_the_round_before(
    stopped: Stopped, complete: Contents, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    folder = stopped(3)
    newest = sorted((folder / "checkpoints").glob(file))[0]
    newest.write_bytes(newest.read_bytes()[:-100])
    resumed = polyfed.resume(folder, quiet=True)
    damaged = f"client '{newest.parent.name}'" if "clients" in file else "round-000002"
    assert f"{damaged} is damaged" in caplog.text
    assert "continuing from round 1" in caplog.text
    assert contents(resumed) == complete


def test_resuming_a_finished_run_changes_nothing(finished: Path, complete: Contents) -> None:
    assert contents(polyfed.resume(finished, quiet=True)) == complete


def emptied(folder: Path) -> None:
    for path in (folder / "checkpoints").glob("round-*.safetensors"):
        path.write_bytes(b"")


def without_clients(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints" / "clients")


def edited(folder: Path) -> None:
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("rounds: 3", "rounds: 4"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (emptied, r"no usable checkpoint \(checkpoint round-000003 is damaged"),
        (without_clients, r"no usable checkpoint \(the state of client '[\w-]+' is damaged"),
        (edited, "was edited"),
        (lambda folder: (folder / "config.yaml").unlink(), "is not a run folder"),
    ],
)
def test_runs_that_cannot_go_on_give_the_reason(finished: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(finished)
    with pytest.raises(RunError, match=message):
        polyfed.resume(finished, quiet=True)


def test_a_folder_that_holds_something_is_left_alone(config: Config, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("precious")
    with pytest.raises(RunError, match="exists and is not empty"):
        polyfed.run(Experiment.parse(config), tmp_path / "a", quiet=True)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["thesis.tex"]


def test_a_run_killed_before_its_first_checkpoint_starts_again(finished: Path, complete: Contents) -> None:
    for path in (finished / "checkpoints").glob("round-*"):
        path.unlink()
    assert contents(polyfed.resume(finished, quiet=True)) == complete


def test_a_folder_of_preparations_that_were_killed_can_be_used(config: Config, tmp_path: Path) -> None:
    (tmp_path / "a" / "vocabulary").mkdir(parents=True)
    (tmp_path / "a" / ".lock").touch()
    assert polyfed.run(Experiment.parse(config), tmp_path / "a", quiet=True).records.rounds == 3


def test_a_run_keeps_its_identity_and_shares_it_with_no_other(config: Config, tmp_path: Path) -> None:
    config["run"]["rounds"] = 1
    first, second = (polyfed.run(Experiment.parse(config), tmp_path / name, quiet=True).folder for name in "ab")
    names = [json.loads((folder / "run.json").read_text())["run"] for folder in (first, second)]
    assert names[0] != names[1]
    polyfed.resume(first, quiet=True)
    assert json.loads((first / "run.json").read_text())["run"] == names[0]
    assert contents(first) == contents(second)


def test_a_second_process_cannot_work_on_the_same_run(finished: Path) -> None:
    with RunFolder.existing(finished).lock(), pytest.raises(RunError, match="another process"):
        polyfed.resume(finished, quiet=True)


def test_a_look_at_the_lock_does_not_count_as_work(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not folder.is_worked_on()
    assert list(tmp_path.iterdir()) == []  # nor leaves anything
    with folder.lock():
        assert folder.is_worked_on()
    with (tmp_path / ".lock").open() as prober:  # one that is asking, at this very moment
        fcntl.flock(prober, fcntl.LOCK_SH)
        assert not folder.is_worked_on()
        threading.Timer(0.05, lambda: fcntl.flock(prober, fcntl.LOCK_UN)).start()
        with folder.lock():
            assert folder.is_worked_on()
    assert not folder.is_worked_on()


def test_the_run_folder_is_complete(config: Config, tmp_path: Path) -> None:
    config["run"] |= {"output": {"plots": True}, "rounds": 1}
    folder = run(Experiment.parse(config), tmp_path / "a").folder
    names = {path.name for path in folder.iterdir()}
    files = ("config.yaml", "environment.json", "run.json", "partition.json", "report.md")
    logs = ("metrics.jsonl", "ledger.jsonl", "timing.jsonl")
    assert names >= {*files, *logs, "arrays", "checkpoints", "models", "plots", "vocabulary"}
    assert json.loads((folder / "environment.json").read_text())["versions"]["torch"] == torch.__version__
    assert {path.name for path in (folder / "models").iterdir()} == {"last", "best"}


def test_a_run_without_server_and_global_models_is_resumed(tiny: Config, tmp_path: Path) -> None:
    del tiny["server"]
    tiny["algorithm"] = {"name": "local", "local_epochs": 1}
    complete = polyfed.run(Experiment.parse(tiny), tmp_path / "whole", quiet=True)
    again = polyfed.resume(cut_short(tiny, tmp_path / "cut"), quiet=True)
    assert (again.folder / "metrics.jsonl").read_bytes() == (complete.folder / "metrics.jsonl").read_bytes()
