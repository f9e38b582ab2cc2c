"""Runs on a disk that is full."""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polyfed
from misbehaving import contents
from polyfed.core.errors import RunError
from polyfed.reporting.api import resume, run
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from small_federations import Config


def filling(monkeypatch: pytest.MonkeyPatch, module: str, name: str, code: int = errno.ENOSPC) -> None:
    """From now on there is no room for files of that name."""
    write = importlib.import_module(module).write_atomically

    def full(path: Path, data: bytes) -> None:
        if name in str(path):
            raise OSError(code, os.strerror(code), str(path))
        write(path, data)

    monkeypatch.setattr(f"{module}.write_atomically", full)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("round-000002.safetensors", errno.ENOSPC),
        ("round-000002.json", errno.EDQUOT),
        ("models/last/model.safetensors", errno.ENOSPC),
    ],
)
def test_a_full_disk_says_how_to_go_on(
    stopped: Callable[[int], Path], whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    out = stopped(2)
    with monkeypatch.context() as patch:
        filling(patch, "polyfed.runs.folder", name, code)
        with pytest.raises(RunError, match=f"make room and continue with 'polyfed resume {out}'") as caught:
            polyfed.resume(out, quiet=True)
    assert os.strerror(code) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(polyfed.resume(out, quiet=True)) == whole


@pytest.mark.slow
def test_a_log_that_could_not_be_written_whole_is_cut_back(
    config: Config, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
            polyfed.run(Experiment.parse(config), tmp_path / "a", quiet=True)
    assert contents(polyfed.resume(tmp_path / "a", quiet=True)) == whole


def test_a_full_disk_during_the_preparation_leaves_nothing_to_resume(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filling(monkeypatch, "polyfed.runs.folder", "partition.json")
    with pytest.raises(RunError, match="cannot write to run folder") as caught:
        polyfed.run(Experiment.parse(config), tmp_path / "a", quiet=True)
    assert not (tmp_path / "a").exists()
    assert "polyfed resume" not in str(caught.value)


@pytest.mark.slow
def test_a_full_disk_at_the_very_end_says_how_to_go_on(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(records: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("polyfed.reporting.api.write_report", full)
        with pytest.raises(RunError, match="make room and continue with 'polyfed resume"):
            run(Experiment.parse(config), tmp_path / "a")
    assert resume(tmp_path / "a").records.rounds == 3
    assert (tmp_path / "a" / "report.md").is_file()


def test_other_errors_of_the_system_are_not_dressed_up(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filling(monkeypatch, "polyfed.runs.folder", "round-000001.json", errno.EISDIR)
    with pytest.raises(IsADirectoryError):
        polyfed.run(Experiment.parse(config), tmp_path / "a", quiet=True)


@pytest.mark.slow
def test_a_client_without_room_is_left_out_and_goes_on_from_where_it_stood(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config["run"]["sampling"] = {"cohort": None}
    filling(monkeypatch, "polyfed.federation.state", "image/000002-00")
    result = polyfed.run(Experiment.parse(config), tmp_path / "a", quiet=True)
    assert [(event.round, event.participant) for event in result.records.excluded()] == [(2, "image")]
    assert "No space left on device" in result.records.excluded()[0].reason
    labels = sorted(path.stem for path in (result.folder / "checkpoints/clients/image").iterdir())
    assert labels == ["000001-00", "000003-00"]
