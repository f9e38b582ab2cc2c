"""Disks that are really full: small file systems of their own, or files that may not grow."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_grid import Rule
from federations_in_process import InProcess
from struck_runs import events, reasons, results

import polyfed
from polyfed import Experiment
from polyfed.core.errors import RunError
from polyfed.core.files import write_atomically
from polyfed.runs.folder import RunFolder


@contextlib.contextmanager
def small(folder: Path, size: str) -> Iterator[None]:
    """A file system of that size at a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"cannot mount a file system here: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, leave: int) -> Path:
    """Leave so many bytes."""
    room = os.statvfs(folder)
    path = folder / "filling"
    path.write_bytes(bytes(max(room.f_bavail * room.f_frsize - leave, 0)))
    return path


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs")
@pytest.mark.parametrize("leave", [0, 8192, 65536])
def test_a_run_whose_disk_fills_up_stops_and_goes_on_when_there_is_room(
    keeping: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: int
) -> None:
    begin = RunFolder.begin

    def begin_and_fill(folder: RunFolder, *arguments: Any) -> None:
        begin(folder, *arguments)
        fill(tmp_path / "disk", leave)

    with small(tmp_path / "disk", "8m"):
        out = tmp_path / "disk" / "run"
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "begin", begin_and_fill)
            with pytest.raises(RunError, match=f"No space left on device; .* continue with 'polyfed resume {out}'"):
                polyfed.run(Experiment.parse(keeping), out, quiet=True)
        assert not list(out.rglob("*.tmp"))
        (tmp_path / "disk" / "filling").unlink()
        assert results(polyfed.resume(out, quiet=True).folder) == undisturbed


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs")
def test_a_site_whose_disk_is_full_is_left_out_and_goes_on_when_there_is_room(
    federation: InProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = federation.folder / "image" / "state"
    with small(states, "2m"):
        filling = states / "filling"

        def full(delivery: Any) -> Any:
            fill(states, 0)
            try:
                return delivery.serve(delivery.message.content)
            finally:
                filling.unlink()

        federation.grid.rules = [Rule(full, client="image", round=2, step="fit")]
        folder = federation.run(tmp_path / "run", evaluate_clients=False).folder
        assert events(folder) == [(2, "image", "client_excluded"), (3, "image", "client_returned")]
        assert reasons(folder)["image"].startswith("OSError: error ")
        assert "No space left on device" in caplog.text
        kept = federation.states("image", "image")
        assert sorted(path.name for path in kept.iterdir()) == ["000001-00.safetensors", "000003-00.safetensors"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
def test_a_file_that_may_not_grow_is_not_left_half_written(tmp_path: Path) -> None:
    """Half of it does fit, which is how disks fill up."""
    path = tmp_path / "file"
    write_atomically(path, b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_atomically(path, bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
