"""Runs: the same twice, complete after every round, and what happens when something breaks."""

from __future__ import annotations

import errno
import importlib
import json
import os
import shutil
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
from polyfed.errors import ConfigError, ExchangeError, RunError
from polyfed.experiment import Experiment
from polyfed.federation.client import Client
from polyfed.federation.payload import Representations
from polyfed.runfolder import RunFolder
from polyfed.runner import Run, resume, run
from sessions import prepared, site_of

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

    @client_step(representations=Representations, num_examples=int)
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


def test_a_share_of_the_cohort_can_be_the_quorum(config: Config, tmp_path: Path) -> None:
    config = failing(config, "raise")
    config["run"]["min_clients"] = 0.6
    assert run(Experiment.parse(config), tmp_path / "a").records.rounds == 3
    config["run"]["min_clients"] = 0.7
    with pytest.raises(ExchangeError, match=r"2 of 3 clients .* the quorum \(run.min_clients\) is 3"):
        run(Experiment.parse(config), tmp_path / "b")


def test_a_client_that_is_back_is_told_of(config: Config, tmp_path: Path) -> None:
    config = failing(config, "raise")
    config["run"]["evaluate_clients"] = False
    result = run(Experiment.parse(config), tmp_path / "a")
    assert happened(result) == [(2, "paired-0", "client_excluded"), (3, "paired-0", "client_returned")]
    assert result.records.events[-1].reason == "answered 'fit'"


def test_an_evaluation_in_the_same_round_shows_that_a_client_is_back(config: Config, tmp_path: Path) -> None:
    result = run(Experiment.parse(failing(config, "raise")), tmp_path / "a")
    assert happened(result) == [(2, "paired-0", "client_excluded"), (2, "paired-0", "client_returned")]
    assert result.records.events[-1].reason == "answered 'assess'"


def test_who_is_away_is_remembered_by_a_resumed_run(config: Config, tmp_path: Path) -> None:
    config = failing(config, "raise")
    config["run"]["evaluate_clients"] = False
    whole = run(Experiment.parse(config), tmp_path / "a")
    before = contents(whole)
    for path in (whole.folder / "checkpoints").glob("round-000003.*"):
        path.unlink()
    resumed = resume(whole.folder)
    assert happened(resumed) == [(2, "paired-0", "client_excluded"), (3, "paired-0", "client_returned")]
    assert contents(resumed) == before


def happened(result: Run) -> list[tuple[int, str, str]]:
    return [(event.round, event.party, event.event) for event in result.records.events]


def test_what_a_failed_client_told_is_kept_in_detail(config: Config, tmp_path: Path) -> None:
    folder = run(Experiment.parse(failing(config, "raise")), tmp_path / "a").folder
    text = (folder / "tracebacks.log").read_text()
    assert text.startswith("--- round 2, client paired-0\nTraceback (most recent call last):\n")
    assert text.endswith('raise ValueError("no GPU left")\nValueError: no GPU left\n')


@pytest.mark.parametrize("how", ["nan", "short"])
def test_a_refused_reply_has_no_traceback(config: Config, tmp_path: Path, how: str) -> None:
    """Nothing was raised where the server could not use what came; what is not finite, the client finds itself."""
    folder = run(Experiment.parse(failing(config, how)), tmp_path / "a").folder
    assert (folder / "tracebacks.log").exists() == (how == "nan")


def test_a_reply_that_is_refused_does_not_move_its_client(config: Config, tmp_path: Path) -> None:
    """Its step is kept by the client, and accepted by nobody: it goes on from where it stood before."""
    folder = run(Experiment.parse(failing(config, "short")), tmp_path / "a").folder
    labels = sorted(path.stem for path in (folder / "checkpoints/clients/paired-0").iterdir())
    assert labels == ["000001-00", "000003-00"]
    assert facts(folder, 2)["accepted"] == {"paired-0": [1, 0], "paired-1": [2, 0], "image": [2, 0]}
    assert facts(folder, 3)["accepted"] == dict.fromkeys(["paired-0", "paired-1", "image"], [3, 0])


def facts(folder: Path, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"checkpoints/round-{number:06d}.json").read_text())["facts"]
    return found


def test_answers_that_come_too_late_never_happened(tiny: Config, tmp_path: Path) -> None:
    tiny["algorithm"] = {"name": "local", "local_epochs": 1}
    tiny["run"] |= {"min_clients": 0, "phases": {"fit": {"deadline": 1e-9}}}
    result = run(Experiment.parse(tiny), tmp_path / "a")
    excluded = result.records.excluded()
    assert len(excluded) == 2 * 3
    assert {event.reason for event in excluded} == {"no answer within 1e-09 s"}
    assert facts(result.folder, 2)["accepted"] == {}
    untrained = tiny | {"run": tiny["run"] | {"rounds": 1, "phases": {}}, "algorithm": "server_only"}
    initial = run(Experiment.parse(untrained), tmp_path / "b")
    for client in ("paired-0", "image"):
        assert result.metrics(client) == initial.metrics(client)


def test_a_quorum_for_a_step_that_the_method_does_not_have(config: Config, tmp_path: Path) -> None:
    config["run"]["phases"] = {"fti": {"deadline": 3}}
    with pytest.raises(ConfigError, match=r"run\.phases\.fti: 'creamfl': did you mean 'fit'\? valid: assess, fit"):
        run(Experiment.parse(config), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_limits_of_the_run_hold_on_both_sides(config: Config, tmp_path: Path) -> None:
    config["run"]["limits"] = {"row_norm": 0.5}  # representations have unit norm
    with pytest.raises(ExchangeError, match=r"representations: tensor '\w+' has norm 1, the limit is 0\.5"):
        run(Experiment.parse(config), tmp_path / "a")
    config["run"]["limits"] = {"row_norm": 1e9, "tensor_norm": 1e9}
    session = prepared(config, tmp_path / "b")
    assert site_of(session).limits == session.experiment.run.limits


# ---- what is lost


def test_lost_states_of_clients_stop_a_resume_with_the_reason(config: Config, tmp_path: Path) -> None:
    interrupted(config, tmp_path / "a", tmp_path / "marker", at=3)
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "clients")
    with pytest.raises(RunError, match=r"no usable checkpoint \(the state of client '[\w-]+' is damaged"):
        resume(tmp_path / "a")


def test_a_run_keeps_its_identity_and_shares_it_with_no_other(config: Config, tmp_path: Path) -> None:
    config["run"]["rounds"] = 1
    first, second = (run(Experiment.parse(config), tmp_path / name).folder for name in "ab")
    names = [json.loads((folder / "run.json").read_text())["run"] for folder in (first, second)]
    assert names[0] != names[1]
    resume(first)
    assert json.loads((first / "run.json").read_text())["run"] == names[0]
    assert contents(first) == contents(second)


# ---- a full disk


def filling(monkeypatch: pytest.MonkeyPatch, module: str, name: str, code: int = errno.ENOSPC) -> None:
    """From now on there is no room for files of that name."""
    write = importlib.import_module(module).write_atomically

    def full(path: Path, data: bytes) -> None:
        if name in str(path):
            raise OSError(code, os.strerror(code), str(path))
        write(path, data)

    monkeypatch.setattr(f"{module}.write_atomically", full)


@pytest.mark.parametrize("name", ["round-000002.safetensors", "round-000002.json", "models/last/model.safetensors"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_how_to_go_on(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    out = tmp_path / "a"
    interrupted(config, out, tmp_path / "marker", at=2)
    with monkeypatch.context() as patch:
        filling(patch, "polyfed.runfolder", name, code)
        with pytest.raises(RunError, match=f"make room and continue with 'polyfed resume {out}'") as caught:
            resume(out)
    assert os.strerror(code) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(resume(out)) == contents(run(Experiment.parse(config), tmp_path / "b"))


def test_a_log_that_could_not_be_written_whole_is_cut_back(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = RunFolder.append

    def partly(folder: RunFolder, log: str, records: Any) -> None:
        append(folder, log, records)
        if log == "ledger" and records and records[0]["round"] == 2:
            (folder.path / "ledger.jsonl").open("a").write('{"round": 2, "cli')
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", partly)
        with pytest.raises(RunError, match="polyfed resume"):
            run(Experiment.parse(config), tmp_path / "a")
    assert contents(resume(tmp_path / "a")) == contents(run(Experiment.parse(config), tmp_path / "b"))


def test_a_full_disk_during_the_preparation_leaves_nothing_to_resume(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filling(monkeypatch, "polyfed.runfolder", "partition.json")
    with pytest.raises(RunError, match="cannot write to run folder") as caught:
        run(Experiment.parse(config), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert "polyfed resume" not in str(caught.value)


def test_a_full_disk_at_the_very_end_says_how_to_go_on(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(records: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("polyfed.runner.write_report", full)
        with pytest.raises(RunError, match="make room and continue with 'polyfed resume"):
            run(Experiment.parse(config), tmp_path / "a")
    assert resume(tmp_path / "a").records.rounds == 3
    assert (tmp_path / "a" / "report.md").is_file()


def test_other_errors_of_the_system_are_not_dressed_up(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filling(monkeypatch, "polyfed.runfolder", "round-000001.json", errno.EISDIR)
    with pytest.raises(IsADirectoryError):
        run(Experiment.parse(config), tmp_path / "a")


def test_a_client_without_room_is_left_out_and_goes_on_from_where_it_stood(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config["run"]["sampling"] = {"cohort": None}
    filling(monkeypatch, "polyfed.federation.state", "image/000002-00")
    result = run(Experiment.parse(config), tmp_path / "a")
    assert [(event.round, event.party) for event in result.records.excluded()] == [(2, "image")]
    assert "No space left on device" in result.records.excluded()[0].reason
    labels = sorted(path.stem for path in (result.folder / "checkpoints/clients/image").iterdir())
    assert labels == ["000001-00", "000003-00"]


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
