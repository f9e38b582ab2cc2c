"""Opened runs, also those of older versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import polyfed
from polyfed import Experiment
from polyfed.core.errors import ConfigError, RunError
from polyfed.core.moved import with_moved
from polyfed.runs.opened import open_run


def test_models_are_those_that_clients_kept(fedafd_run: Path) -> None:
    opened = open_run(fedafd_run)
    assert opened.clients == {"paired-0": (1, 0), "paired-1": (1, 0), "image": (1, 0)}
    for client in opened.clients:
        (path,) = (fedafd_run / "checkpoints" / "clients" / client).glob("*.safetensors")
        kept = {
            name.removeprefix("model/"): value
            for name, value in safetensors.torch.load_file(path).items()
            if name.startswith("model/")
        }
        model = opened.client_model(client)
        assert not model.training
        assert kept.keys() == model.state_dict().keys()
        assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())


def test_runs_without_kept_models(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"clients of 'fedavg' keep no model in .*such as creamfl, fedafd or local"):
        _ = open_run(tiny_run).clients
    with pytest.raises(RunError, match="is not a run folder"):
        _ = open_run(tmp_path).clients


def test_a_client_or_a_state_that_is_not_there(fedafd_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(fedafd_run, tmp_path / "copy"))
    opened = open_run(folder)
    with pytest.raises(ConfigError, match=r"no client 'imag' took part in .*did you mean 'image'"):
        opened.client_model("imag")
    shutil.rmtree(folder / "checkpoints" / "clients" / "image")
    with pytest.raises(RunError, match="state of client 'image' after round 1, phase 0 is not here"):
        opened.client_model("image")
    with pytest.raises(RunError, match="does not fit its model"):
        opened.client_model("paired-0", {"model": {"weight": torch.zeros(1)}})
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(RunError, match="has taken part in a complete round yet"):
        _ = open_run(folder).clients


def test_a_run_and_the_same_run_opened_are_alike(tiny: dict[str, Any], tmp_path: Path) -> None:
    tiny["run"] |= {"rounds": 1}
    finished = polyfed.run(Experiment.load(tiny), tmp_path / "run", quiet=True)
    opened = open_run(tmp_path / "run")
    assert opened == finished
    assert opened.name == "run"
    assert opened.experiment.to_yaml() == (tmp_path / "run" / "config.yaml").read_text()
    assert opened.metrics() == finished.metrics()
    assert list(opened.federation.members) == list(opened.records.holdings)
    assert opened.checkpoint.round == 1
    assert (opened.server_model().which, opened.server_model("last").round) == ("best", 1)
    assert opened.global_weights.keys() == {"paired", "image"}
    assert all(
        torch.equal(value, opened.global_weights["paired"][name])
        for name, value in opened.global_model("paired").state_dict().items()
    )


def test_names_of_heads_are_those_of_the_run_in_later_versions(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Experiment, "salt", "another")
    opened = open_run(tiny_run)
    assert opened.global_model("image").heads.keys() == {opened.federation.members["image"].head}


def test_data_and_device_may_be_elsewhere(tiny_run: Path, tmp_path: Path) -> None:
    opened = open_run(tiny_run, data_dir=tmp_path / "data", weights_dir=tmp_path / "weights", device="cpu")
    for settings in (opened.experiment.data, opened.conditions.data):
        assert (settings.data_folder, settings.weights_folder) == (tmp_path / "data", tmp_path / "weights")
    assert opened.place == torch.device("cpu")
    with pytest.raises(ConfigError, match="device"):
        _ = open_run(tiny_run, device="nothing").place


def test_opening_records_imports_no_torch(tiny_run: Path) -> None:
    code = "import sys, polyfed; polyfed.open_run(sys.argv[1]).records.rounds; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tiny_run)], check=True)


def test_other_folders_and_edited_runs_are_refused(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        open_run(tmp_path / "nothing")
    folder = Path(shutil.copytree(tiny_run, tmp_path / "copy"))
    for path in (folder / "checkpoints").glob("round-*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(RunError, match="has no readable checkpoint; finish it with polyfed resume"):
        _ = open_run(folder).checkpoint
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text() + "\n")
    assert open_run(folder).records.rounds == 1
    with pytest.raises(RunError, match="was edited"):
        _ = open_run(folder).experiment


def test_models_of_rounds_and_of_clients_are_kept_where_that_is_asked_for(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Neither changes a result; and what FedAvg's clients sent in the last round averages to the global model."""
    tiny["run"] |= {"rounds": 2, "evaluate_clients": False}
    plain = polyfed.run(Experiment.load(tiny), tmp_path / "plain", quiet=True)
    tiny["run"] |= {"output": {"plots": False, "keep_rounds": [0, 1], "keep_client_models": True}}
    kept = polyfed.run(Experiment.load(tiny), tmp_path / "kept", quiet=True)
    for client_type, weights in plain.global_weights.items():
        assert all(torch.equal(value, kept.global_weights[client_type][name]) for name, value in weights.items())
    assert [kept.server_model(which).round for which in ("0", "1", "2", "round-1", "last")] == [0, 1, 2, 1, 2]
    before, after = (kept.server_model(which).model.state_dict() for which in ("0", "2"))
    assert any(not torch.equal(value, after[name]) for name, value in before.items())
    with pytest.raises(RunError, match=r"no model '7'; it has: .*last \(round 2\), round-0 \(round 0\), round-1"):
        kept.server_model("7")
    with pytest.raises(RunError, match=r"no model '1'; .*run\.output\.keep_rounds"):
        plain.server_model("1" if plain.server_model().round != 1 else "0")
    assert [version[0] for version in kept.clients.values()] == [2, 2, 2]
    samples = {client.id: client.samples for client in kept.federation.infos}
    locals_ = {client: kept.client_model(client).state_dict() for client in ("paired-0", "paired-1")}
    total = sum(samples[client] for client in locals_)
    for name, value in kept.global_weights["paired"].items():
        if value.is_floating_point():
            mean = sum(samples[client] / total * state[name] for client, state in locals_.items())
            torch.testing.assert_close(mean, value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("version", ["0.3.0", "0.4.0"])
def test_a_run_of_an_older_version_is_opened_measured_and_done_again(tmp_path: Path, version: str) -> None:
    shutil.unpack_archive(Path(__file__).with_name(f"run-{version}.zip"), folder := tmp_path / "old")
    old = polyfed.open_run(folder)
    assert polyfed.evaluate_model(folder, "scenes").metrics["r1_sum"] == pytest.approx(old.metrics()["r1_sum"])
    assert polyfed.load_model(folder).encode(texts=["a red square"]).shape == (1, 8)
    experiment = Experiment.load(str(folder / "config.yaml"), ["run.rounds=1"])
    again = polyfed.run(experiment, tmp_path / "again", quiet=True).records.series("server", "r1_sum")
    assert again[1] == pytest.approx(old.records.series("server", "r1_sum")[1])


def test_an_interrupted_run_of_0_4_goes_on_to_the_same_metrics_and_one_of_0_3_names_its_version(tmp_path: Path) -> None:
    for version in ("0.3.0", "0.4.0"):
        shutil.unpack_archive(Path(__file__).with_name(f"run-{version}.zip"), tmp_path / version)
    with pytest.raises(RunError, match=r"resume it with polyfed 0\.3\.0, which began it, or start the run again"):
        polyfed.resume(tmp_path / "0.3.0", quiet=True)
    before = polyfed.open_run(tmp_path / "0.4.0").records.series("server", "r1_sum")
    for file in (tmp_path / "0.4.0" / "checkpoints").glob("round-000002.*"):
        file.unlink()
    resumed = polyfed.resume(tmp_path / "0.4.0", quiet=True).records
    assert resumed.series("server", "r1_sum") == pytest.approx(before)


def test_what_is_gone_and_did_something_is_refused(tmp_path: Path) -> None:
    shutil.unpack_archive(Path(__file__).with_name("run-0.3.0.zip"), tmp_path)
    (tmp_path / "config.yaml").write_text((tmp_path / "config.yaml").read_text().replace("topk: null", "topk: 0.1"))
    with pytest.raises(polyfed.PolyfedError, match=r"unknown key 'topk'"):
        Experiment.load(str(tmp_path / "config.yaml"))


def test_keys_of_0_4_that_are_gone_are_left_out_where_they_changed_nothing() -> None:
    assert with_moved({"algorithm": {"first_public": None, "first_private": None}}) == {"algorithm": {}}
    gone = {"mean": "uniform", "public": {"form": "representations"}, "teacher": {"broadcast": "shared", "steps": 3}}
    assert with_moved({"algorithm": gone}) == {"algorithm": {"public": {}, "teacher": {"steps": 3}}}
    older = {"server": {"training": {"optimizer": {"lr": 0.1, "nesterov": False}}}}
    assert with_moved(older) == {"server": {"training": {"optimizer": {"lr": 0.1}}}}
