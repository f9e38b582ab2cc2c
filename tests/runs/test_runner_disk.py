"""Runs on a disk that is full, or loses data with the power."""

from __future__ import annotations

import errno
import importlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import polyfed
from misbehaving import contents, facts, happened
from polyfed.core.errors import RunError
from polyfed.core.files import write_atomically
from polyfed.reporting.api import resume, run
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import LOGS, RunFolder
from small_federations import Config


def filling(monkeypatch: pytest.MonkeyPatch, module: str, name: str, code: int = errno.ENOSPC) -> None:
    """From now on the disk is full for files of that name."""
    write = importlib.import_module(module).write_atomically

    def full(path: Path, data: bytes) -> None:
        if name in str(path):
            raise OSError(code, os.strerror(code), str(path))
        write(path, data)

    monkeypatch.setattr(f"{module}.write_atomically", full)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("round-000002.json", errno.EDQUOT),
        pytest.param("round-000002.safetensors", errno.ENOSPC, marks=pytest.mark.slow),
        pytest.param("models/last/model.safetensors", errno.ENOSPC, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_names_the_command_that_continues(
    stopped: Callable[[int], Path], complete: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    out = stopped(2)
    with monkeypatch.context() as patch:
        filling(patch, "polyfed.runs.folder", name, code)
        with pytest.raises(RunError, match=f"make room and continue with 'polyfed resume {out}'") as caught:
            polyfed.resume(out, quiet=True)
    assert os.strerror(code) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(polyfed.resume(out, quiet=True)) == complete


@pytest.mark.slow
def test_a_log_that_could_not_be_written_whole_is_cut_back(
    config: Config, complete: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert contents(polyfed.resume(tmp_path / "a", quiet=True)) == complete


def test_a_disk_full_at_first_leaves_nothing(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filling(monkeypatch, "polyfed.runs.folder", "partition.json")
    with pytest.raises(RunError, match="cannot write to run folder") as caught:
        polyfed.run(Experiment.parse(config), tmp_path / "a", quiet=True)
    assert not (tmp_path / "a").exists()
    assert "polyfed resume" not in str(caught.value)


@pytest.mark.slow
def test_a_full_disk_at_last_names_the_command(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr("polyfed.reporting.api.write_report", full)
        with pytest.raises(RunError, match="make room and continue with 'polyfed resume"):
            run(Experiment.parse(config), tmp_path / "a")
    assert resume(tmp_path / "a").records.rounds == 3
    assert (tmp_path / "a" / "report.md").is_file()


def test_other_system_errors_stay_as_they_are(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filling(monkeypatch, "polyfed.runs.folder", "round-000001.json", errno.EISDIR)
    with pytest.raises(IsADirectoryError):
        polyfed.run(Experiment.parse(config), tmp_path / "a", quiet=True)


@pytest.mark.slow
def test_a_client_without_room_goes_on_later(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config["run"]["sampling"] = {"cohort": None}
    filling(monkeypatch, "polyfed.federation.state", "image/000002-00")
    result = polyfed.run(Experiment.parse(config), tmp_path / "a", quiet=True)
    assert [(event.round, event.participant) for event in result.records.excluded()] == [(2, "image")]
    assert "No space left on device" in result.records.excluded()[0].reason
    labels = sorted(path.stem for path in (result.folder / "checkpoints/clients/image").iterdir())
    assert labels == ["000001-00", "000003-00"]


# ---- Runs after a loss of power

Stopped = Callable[[int], Path]
WRITTEN = tuple(log for log in LOGS if log != "pace")  # no client is late in this run


def cut(folder: Path, log: str, size: int, zeros: int = 0) -> None:
    """Leave a log with its first bytes, and zeros after them."""
    path = folder / f"{log}.jsonl"
    path.write_bytes(path.read_bytes()[:size] + bytes(zeros))


class Disk:
    """Synced paths in order: a file with its size, or a folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[tuple[Path, int]] = []
        monkeypatch.setattr("os.fsync", self._sync)

    def _sync(self, descriptor: int) -> None:
        self.synced.append((Path(f"/proc/self/fd/{descriptor}").readlink(), os.fstat(descriptor).st_size))


def test_what_manifests_count_is_synced_first(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, out = Disk(monkeypatch), tmp_path / "run"
    polyfed.run(Experiment.parse(config), out, quiet=True)
    for number in (2, 3):
        counted = facts(out, number)["logs"]
        manifests = [k for k, (path, _) in enumerate(disk.synced) if f".round-{number:06d}.json." in path.name]
        before = disk.synced[: manifests[-1]]
        assert {log for log in WRITTEN if (out / f"{log}.jsonl", counted[log]) in before} == set(WRITTEN)
        assert out in [path for path, _ in before]  # that the logs are there is in their folder
        assert out / "checkpoints" in [path for path, _ in disk.synced[manifests[-1] :]]


def test_a_file_that_is_complete_is_there_with_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    write_atomically(tmp_path / "a" / "b" / "file", b"content")
    paths = [path for path, _ in disk.synced]
    assert set(paths[1:]) == {tmp_path / "a" / "b", tmp_path / "a", tmp_path}
    assert paths[0].parent == tmp_path / "a" / "b"


@pytest.mark.parametrize(("log", "zeros"), [*zip(WRITTEN, itertools.cycle([0, 9, 100_000]))])
def test_a_round_whose_logs_are_lost_is_done_again(stopped: Stopped, complete: Any, log: str, zeros: int) -> None:
    out = stopped(3)
    cut(out, log, facts(out, 1)["logs"][log] + 5, zeros)
    result = polyfed.resume(out, quiet=True)
    assert contents(result) == complete
    assert (1, "server", "checkpoint_skipped") in happened(result)
    reasons = [event.reason for event in result.records.events if event.incident == "checkpoint_skipped"]
    assert f"{log}.jsonl" in reasons[0]


def test_a_log_is_never_extended(stopped: Stopped) -> None:
    out = stopped(3)
    size = facts(out, 1)["logs"]["metrics"] - 5
    cut(out, "metrics", size)
    counted = facts(out, 2)["logs"]["metrics"]
    reason = rf"^[^\n]*metrics\.jsonl has {size:,} bytes of {counted:,}[^\n]*restore it from a copy[^\n]*$"
    with pytest.raises(RunError, match=reason):
        polyfed.resume(out, quiet=True)
    assert (out / "metrics.jsonl").stat().st_size == size
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        RunFolder(out).rewind_logs(facts(out, 2)["logs"])
    assert (out / "metrics.jsonl").stat().st_size == size


def test_a_history_that_was_cut_off_goes_on_with_a_new_line(stopped: Stopped) -> None:
    out = stopped(2)
    line = json.dumps({"round": 1, "participant": "server", "event": "resumed", "reason": "after round 1"})
    (out / "history.jsonl").write_text(f"{line}\n{line[:30]}" + "\0" * 20)
    assert happened(polyfed.resume(out, quiet=True))[:2] == [(1, "server", "resumed")] * 2
