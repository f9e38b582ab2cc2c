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

from polyfed import Experiment, run
from polyfed.cli.deploy import deploy_app
from polyfed.core.errors import ConfigError, RunError
from polyfed.deploy import init as module
from polyfed.deploy.init import rehearse


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

    command = [*CLI, "deploy", "rehearse", "consortium.yaml", "rehearsal", "--compare", "desk"]

    def start() -> subprocess.Popen[str]:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, **streams)

    run(Experiment.load(tmp_path / "consortium.yaml"), tmp_path / "desk")
    first = start()
    wait_until((tmp_path / "rehearsal/run/checkpoints/round-000001.json").exists, 300, lambda: "no round")
    (site,) = [pid for pid, line in marked_processes(mark).items() if "deploy site rehearsal/archive" in line]
    os.kill(site, signal.SIGKILL)
    output, _ = first.communicate()
    assert first.returncode == 2, output
    assert "the rehearsal ended with archive (exit code -9)" in output
    wait_until(lambda: not marked(mark), 40, lambda: f"left: {marked(mark)}")
    again = start()
    output, _ = again.communicate()
    assert again.returncode == 0, output
    assert "equal to desk: metrics.jsonl and all weights of models" in output
    wait_until(lambda: not marked(mark), 40, lambda: f"left: {marked(mark)}")


def test_what_cannot_be_rehearsed_ends_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, reported = consortium(tmp_path), list[str]()
    monkeypatch.setattr(module, "_POLYFED", ("sh", "-c", "echo no such port; exit 3"))
    with pytest.raises(RunError, match=r"ended with server \(exit code 3\)"):
        rehearse(Experiment.parse(settings), tmp_path / "f", reported.append)
    assert "server: no such port" in reported
    monkeypatch.setattr(module, "_POLYFED", ("sh", "-c", "sleep 60"))
    monkeypatch.setattr(module, "_is_open", lambda server: True)
    (tmp_path / "letters.csv").unlink()
    with pytest.raises(RunError, match=r"site archive: .* data.sources.reports.path: .* is missing"):
        rehearse(Experiment.parse(settings), tmp_path / "f", reported.append)
    with pytest.raises(RunError, match="of another experiment"):
        rehearse(Experiment.parse(settings | {"name": "other"}), tmp_path / "f", reported.append)


def test_a_rehearsal_unlike_the_run_lists_the_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(name)
    monkeypatch.setattr(module, "rehearse", lambda *arguments: tmp_path / "run")
    done = CliRunner().invoke(deploy_app, ["rehearse", "scenes-demo", "--compare", str(tmp_path / "other")])
    assert str(done.exception) == f"{tmp_path / 'run'} differs from {tmp_path / 'other'} in metrics.jsonl"
    arguments = ["rehearse", "scenes-demo", "--compare", str(tmp_path / "nowhere")]
    with pytest.raises(ConfigError, match="nowhere is not a run folder"):  # before anything is started
        CliRunner().invoke(deploy_app, arguments, catch_exceptions=False)


def test_a_federation_without_a_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="--host is missing: the server's name or address"):
        CliRunner().invoke(deploy_app, ["init", "scenes-demo"], catch_exceptions=False)
