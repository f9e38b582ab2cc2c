"""Runs: the same twice, complete after every round, and what happens when something breaks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from polyfed.algorithms.algorithm import Reply, client_step
from polyfed.algorithms.creamfl import CreamFL
from polyfed.errors import ExchangeError, RunError
from polyfed.experiment import Experiment
from polyfed.federation.client import Client
from polyfed.federation.payload import Representations
from polyfed.runner import Run, resume, run

Config = dict[str, Any]
COMPARED = ("metrics.jsonl", "ledger.jsonl", "partition.json", "models/last/model.safetensors")


@pytest.fixture
def config(tiny: Config) -> Config:
    tiny["algorithm"] = {"name": "creamfl", "local_epochs": 1, "public_batch_size": 16}
    tiny["run"] |= {"rounds": 3, "sampling": {"cohort": 2}}
    return tiny


def contents(result: Run | Path) -> dict[str, bytes]:
    folder = result if isinstance(result, Path) else result.folder
    return {name: (folder / name).read_bytes() for name in COMPARED}


def test_the_same_configuration_gives_the_same_run(config: Config, tmp_path: Path) -> None:
    first = run(Experiment.parse(config), tmp_path / "a")
    second = run(Experiment.load(first.folder / "config.yaml"), tmp_path / "b")
    assert contents(first) == contents(second)


class Stops(CreamFL):
    """Stops the process's work in one round, as often as a file says."""

    home_of: ClassVar[str] = "tests"
    marker: str
    at: int = 2

    def round(self, server: Any, cohort: Any) -> None:
        super().round(server, cohort)
        marker = Path(self.marker)
        if server.clock.round == self.at and marker.exists():
            marker.unlink()
            raise KeyboardInterrupt


def interrupted(config: Config, folder: Path, marker: Path, at: int = 2) -> None:
    marker.touch()
    name = f"{Stops.__module__}.Stops"
    config["algorithm"] = config["algorithm"] | {"name": name, "marker": str(marker), "at": at}
    with pytest.raises(KeyboardInterrupt):
        run(Experiment.parse(config), folder)


def test_an_interrupted_run_ends_in_the_bits_of_an_uninterrupted_one(config: Config, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    interrupted(config, tmp_path / "a", marker)
    resumed = resume(tmp_path / "a")
    whole = run(Experiment.parse(config), tmp_path / "b")
    assert contents(resumed) == contents(whole)


def test_a_damaged_checkpoint_falls_back_to_the_round_before(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(config, tmp_path / "a", tmp_path / "marker", at=3)
    newest = sorted((tmp_path / "a" / "checkpoints").glob("round-*.safetensors"))[-1]
    assert newest.stem == "round-000002"
    newest.write_bytes(newest.read_bytes()[:-100])
    resumed = resume(tmp_path / "a")
    assert "round-000002 is damaged" in caplog.text
    assert "continuing from round 1" in caplog.text
    assert contents(resumed) == contents(run(Experiment.parse(config), tmp_path / "b"))


def test_a_damaged_client_state_falls_back_too(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(config, tmp_path / "a", tmp_path / "marker", at=3)
    states = sorted((tmp_path / "a" / "checkpoints" / "clients").rglob("000002-*.safetensors"))
    states[0].write_bytes(b"rubbish")
    resumed = resume(tmp_path / "a")
    assert f"client '{states[0].parent.name}' is damaged" in caplog.text
    assert contents(resumed) == contents(run(Experiment.parse(config), tmp_path / "b"))


def test_resuming_a_finished_run_changes_nothing(config: Config, tmp_path: Path) -> None:
    finished = run(Experiment.parse(config), tmp_path / "a")
    before = contents(finished)
    assert contents(resume(finished.folder)) == before


def test_a_run_without_any_readable_checkpoint_says_so(config: Config, tmp_path: Path) -> None:
    result = run(Experiment.parse(config), tmp_path / "a")
    for path in (result.folder / "checkpoints").glob("round-*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(RunError, match=r"no usable checkpoint \(checkpoint round-000003 is damaged"):
        resume(result.folder)


def test_what_is_no_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no run folder"):
        resume(tmp_path)


def test_an_edited_configuration_cannot_be_resumed(config: Config, tmp_path: Path) -> None:
    folder = run(Experiment.parse(config), tmp_path / "a").folder
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("rounds: 3", "rounds: 4"))
    with pytest.raises(RunError, match="was edited"):
        resume(folder)


def test_a_folder_that_holds_something_is_left_alone(config: Config, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("precious")
    with pytest.raises(RunError, match="exists and is not empty"):
        run(Experiment.parse(config), tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["thesis.tex"]


def test_a_run_killed_before_its_first_checkpoint_starts_again(config: Config, tmp_path: Path) -> None:
    whole = run(Experiment.parse(config), tmp_path / "a")
    before = contents(whole)
    for path in (whole.folder / "checkpoints").glob("round-*"):
        path.unlink()
    assert contents(resume(whole.folder)) == before


def test_a_folder_of_preparations_that_were_killed_can_be_used(config: Config, tmp_path: Path) -> None:
    (tmp_path / "a" / "vocabulary").mkdir(parents=True)
    (tmp_path / "a" / ".lock").touch()
    assert run(Experiment.parse(config), tmp_path / "a").records.rounds == 3


# ---- clients that fail


class Fails(CreamFL):
    """One client misbehaves in round 2."""

    client: str = "paired-0"
    how: str = "raise"

    @client_step
    def fit(self, client: Client, representations: Representations) -> Reply:
        reply = super().fit(client, representations)
        if client.name != self.client or client.clock.round != 2:
            return reply
        if self.how == "raise":
            raise ValueError("no GPU left")
        own = dict(reply.representations)
        bad = {name: value[:-1] if self.how == "short" else value * float("nan") for name, value in own.items()}
        order = "another" if self.how == "order" else representations.order
        tensors = own if self.how == "order" else bad
        return Reply(representations=Representations(tensors, order=order), num_examples=client.num_examples)


def failing(config: Config, how: str) -> Config:
    algorithm = config["algorithm"] | {"name": f"{Fails.__module__}.Fails", "how": how}
    return config | {"algorithm": algorithm, "run": config["run"] | {"sampling": {"cohort": None}}}


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "ValueError: no GPU left"),
        ("nan", "NaN"),
        ("short", "expected [80, 8]"),
        ("order", "another public set"),
    ],
)
def test_a_failing_client_is_left_out_of_the_round_and_named(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, reason: str
) -> None:
    result = run(Experiment.parse(failing(config, how)), tmp_path / "a")
    excluded = result.records.excluded()
    assert [(event.round, event.party) for event in excluded] == [(2, "paired-0")]
    assert reason in excluded[0].reason
    assert "client paired-0 is excluded" in caplog.text
    senders = result.records.series("server", "senders.image", "train")
    assert senders == {1: 3.0, 2: 2.0, 3: 3.0}
    weights = list(result.records.series("server", "r1_sum").values())
    assert len(weights) == 4
    assert all(value == value for value in weights)


def test_a_step_that_failed_changed_nothing_on_its_client(config: Config, tmp_path: Path) -> None:
    result = run(Experiment.parse(failing(config, "raise")), tmp_path / "a")
    labels = sorted(path.stem for path in (result.folder / "checkpoints/clients/paired-0").iterdir())
    assert labels == ["000001-00", "000003-00"]


def test_too_few_clients_stop_the_run_and_it_can_be_resumed(config: Config, tmp_path: Path) -> None:
    config = failing(config, "raise")
    config["run"]["min_clients"] = 3
    with pytest.raises(ExchangeError, match=r"round 2: 2 of 3 clients .*paired-0: ValueError: no GPU left"):
        run(Experiment.parse(config), tmp_path / "a")
    names = {path.name for path in (tmp_path / "a" / "checkpoints").glob("round-*.json")}
    assert names == {"round-000000.json", "round-000001.json"}


# ---- killed


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.05, 0.4, 0.9, 1.6])
def test_killed_at_any_moment_and_resumed(config: Config, tmp_path: Path, delay: float) -> None:
    config["run"]["rounds"] = 6
    experiment = Experiment.parse(config)
    (tmp_path / "config.yaml").write_text(experiment.to_yaml())
    code = (
        "import sys; import torch; torch.set_num_threads(1)\n"
        "from polyfed import Experiment, run\n"
        "run(Experiment.load(sys.argv[1]), sys.argv[2])\n"
    )
    folder = tmp_path / "a"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "config.yaml"), str(folder)])
    give_up = time.monotonic() + 120
    while not (folder / "checkpoints" / "round-000000.json").exists() and time.monotonic() < give_up:
        time.sleep(0.01)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    resumed = resume(folder)
    assert contents(resumed) == contents(run(experiment, tmp_path / "b"))
    assert torch.isfinite(torch.tensor(list(resumed.metrics().values()))).all()


def test_a_second_process_cannot_work_on_the_same_run(config: Config, tmp_path: Path) -> None:
    from polyfed.runfolder import RunFolder

    folder = run(Experiment.parse(config), tmp_path / "a").folder
    with RunFolder.existing(folder).lock(), pytest.raises(RunError, match="another process"):
        resume(folder)


def test_the_run_folder_is_complete(config: Config, tmp_path: Path) -> None:
    config["run"]["plots"] = True
    folder = run(Experiment.parse(config), tmp_path / "a").folder
    names = {path.name for path in folder.iterdir()}
    expected = {
        "config.yaml",
        "environment.json",
        "run.json",
        "metrics.jsonl",
        "ledger.jsonl",
        "timing.jsonl",
    }
    assert names >= expected | {
        "partition.json",
        "arrays",
        "checkpoints",
        "models",
        "plots",
        "vocabulary",
        "report.md",
    }
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert {path.name for path in (folder / "models").iterdir()} == {"last", "best"}
