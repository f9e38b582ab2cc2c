"""What 0.3 left is read: run-0.3.0.zip is a run folder of version 0.3.0, without reports and clients' states."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import polyfed
from polyfed import Experiment
from polyfed.core.errors import RunError
from polyfed.core.moved import with_moved


def test_a_run_of_0_3_is_opened_measured_and_done_again_but_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.unpack_archive(Path(__file__).with_name("run-0.3.0.zip"), folder := tmp_path / "old")
    old = polyfed.open_run(folder)
    assert polyfed.evaluate_model(folder, "scenes").metrics["r1_sum"] == pytest.approx(old.metrics()["r1_sum"])
    assert polyfed.load_model(folder).encode(texts=["a red square"]).shape == (1, 8)
    experiment = Experiment.load(str(folder / "config.yaml"), ["run.rounds=1"])
    again = polyfed.run(experiment, tmp_path / "again", quiet=True).records.series("server", "r1_sum")
    assert again[1] == pytest.approx(old.records.series("server", "r1_sum")[1])
    monkeypatch.setattr("polyfed.runs.loop.__version__", "1.0.0")
    with pytest.raises(RunError, match=r"resume it with polyfed 0\.3\.0, which began it, or start the run again"):
        polyfed.resume(folder, quiet=True)


def test_what_is_gone_and_did_something_is_refused(tmp_path: Path) -> None:
    shutil.unpack_archive(Path(__file__).with_name("run-0.3.0.zip"), tmp_path)
    config = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(config.replace("topk: null", "topk: 0.1"))
    with pytest.raises(polyfed.PolyfedError, match=r"unknown key 'topk'"):
        Experiment.load(str(tmp_path / "config.yaml"))


def test_keys_of_0_4_that_are_gone_are_left_out_where_they_changed_nothing() -> None:
    assert with_moved({"algorithm": {"first_public": None, "first_private": None}}) == {"algorithm": {}}
    gone = {"mean": "uniform", "public": {"form": "representations"}, "teacher": {"broadcast": "shared", "steps": 3}}
    assert with_moved({"algorithm": gone}) == {"algorithm": {"public": {}, "teacher": {"steps": 3}}}
    older = {"server": {"training": {"optimizer": {"lr": 0.1, "nesterov": False}}}}
    assert with_moved(older) == {"server": {"training": {"optimizer": {"lr": 0.1}}}}
