"""A rehearsal: the file of a run in one process, as real processes on this machine, with the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from federations import CLI, MARK, marked, marked_processes, wait_until, with_files
from typer.testing import CliRunner

from polyfed import Experiment
from polyfed.cli.deploy import deploy_app
from polyfed.core.errors import RunError
from polyfed.deploy import rehearse as module
from polyfed.deploy.init import create_federation
from polyfed.deploy.rehearse import rehearse, unlike_runs


def consortium(folder: Path) -> dict[str, Any]:
    """A file of two sites, one of letters alone."""
    settings = with_files(folder)
    settings["clients"]["hospital"]["count"] = 1
    settings["run"]["rounds"] = 3
    settings["data"]["cache_dir"] = str(folder / "cache")
    return settings


@pytest.mark.slow
def test_a_rehearsal_that_loses_a_site_goes_on_to_the_bits_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "consortium.yaml").write_text(yaml.safe_dump(consortium(tmp_path)))
    mark = uuid.uuid4().hex
    environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: mark}

    def polyfed(*words: str) -> subprocess.Popen[str]:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([*CLI, *words], cwd=tmp_path, env=environment, **streams)

    polyfed("run", "consortium.yaml", "--out", "desk").communicate()
    command = ["deploy", "rehearse", "consortium.yaml", "rehearsal", "--compare", "desk"]
    first = polyfed(*command)
    wait_until((tmp_path / "rehearsal/run/checkpoints/round-000001.json").exists, 300, lambda: "no round")
    (site,) = [pid for pid, line in marked_processes(mark).items() if "deploy site rehearsal/archive" in line]
    os.kill(site, signal.SIGKILL)
    said, _ = first.communicate()
    assert first.returncode == 2, said
    assert "the rehearsal ended with archive (exit code -9)" in said
    wait_until(lambda: not marked(mark), 40, lambda: f"left: {marked(mark)}")
    again = polyfed(*command)
    said, _ = again.communicate()
    assert again.returncode == 0, said
    assert "equal to desk: metrics.jsonl and all weights of models" in said
    wait_until(lambda: not marked(mark), 40, lambda: f"left: {marked(mark)}")


def test_a_folder_of_another_experiment_is_refused(tmp_path: Path) -> None:
    settings = consortium(tmp_path)
    create_federation(tmp_path / "f", Experiment.parse(settings), ["localhost"], keys=True)
    with pytest.raises(RunError, match="of another experiment"):
        rehearse(Experiment.parse(settings), tmp_path / "f", print)


def test_data_that_do_not_fit_end_a_rehearsal_before_a_site_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_is_open", lambda server: True)
    monkeypatch.setattr(module, "_POLYFED", ("sh", "-c", "sleep 60"))
    settings = consortium(tmp_path)
    settings["data"]["sources"]["reports"]["path"] = "absent.csv"
    with pytest.raises(RunError, match=r"site archive: .* data.sources.reports.path: there is no"):
        rehearse(Experiment.parse(settings), tmp_path / "f", print)


def test_a_process_that_ends_is_shown_with_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLYFED", ("sh", "-c", "echo no such port; exit 3"))
    told: list[str] = []
    with pytest.raises(RunError, match=r"ended with server \(exit code 3\)"):
        rehearse(Experiment.parse(consortium(tmp_path)), tmp_path / "f", told.append)
    assert "server: no such port" in told


def test_runs_are_compared_by_weights_and_metrics(tmp_path: Path) -> None:
    for name, weight in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name / "models").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("{}\n")
        (tmp_path / name / "models" / "best.safetensors").write_bytes(weight)
    assert unlike_runs(tmp_path / "a", tmp_path / "b") == []
    assert unlike_runs(tmp_path / "a", tmp_path / "c") == ["models/best.safetensors"]


def test_the_command_says_what_is_unlike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(name)
    monkeypatch.setattr(module, "rehearse", lambda *arguments: tmp_path / "run")
    done = CliRunner().invoke(deploy_app, ["rehearse", "scenes-demo", "--compare", str(tmp_path / "other")])
    assert str(done.exception) == f"{tmp_path / 'run'} is unlike {tmp_path / 'other'} in metrics.jsonl"
