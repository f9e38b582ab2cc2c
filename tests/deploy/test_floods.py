"""A reply far beyond the limits never gets into the server's process: real processes, and the memory of one of them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from federations import CLI, MARK, Live, python_path, started

from polyfed.runs.records import RunRecords

pytestmark = pytest.mark.slow

FLOODER = Path(__file__).parent / "flooder"
FLOOD = 400_000_000
MIB = 2**20


def server_app_peak(mark: str) -> int:
    """Most memory that the live ServerApp of a federation has had, bytes; 0 if there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_app = b"serverapp" in (folder / "cmdline").read_bytes()
            if is_app and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                seen = re.search(r"VmHWM:\s+(\d+) kB", (folder / "status").read_text())
                return int(seen[1]) * 1024 if seen else 0
    return 0


def peak_of_a_run(live: Live, out: Path, flood: int) -> int:
    """Most memory of the ServerApp during a run; the texts' site adds so many bytes to its replies."""
    environment = live.environment | {"POLYFED_CACHE": str(out.parent / "cache")}
    floods = {"PYTHONPATH": python_path(FLOODER), "POLYFED_FLOOD": str(flood)}
    floods["POLYFED_FLOODED"] = str(out.parent / "flooded")
    hostile = environment | (floods if flood else {})
    with (
        started("site", str(live.folders.path / "archive"), log=out.parent / "archive.log", environment=hostile),
        started("site", str(live.folders.path / "hospital"), log=out.parent / "hospital.log", environment=environment),
    ):
        arguments = ["run", str(live.folders.server.experiment), "--out", str(out)]
        command = [*CLI, *arguments, "--set", "run.exchange.limits.message_bytes=10000000"]
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        run = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        peak = 0
        while run.poll() is None:
            peak = max(peak, server_app_peak(live.environment[MARK]))
            time.sleep(0.05)
        assert run.returncode == 0, run.communicate()[0]
    return peak


def test_an_unreferenced_part_does_not_fill_the_server(live: Live, tmp_path: Path, record_property: Any) -> None:
    honest = peak_of_a_run(live, tmp_path / "honest", 0)
    flooded = peak_of_a_run(live, tmp_path / "attacked", FLOOD)
    excluded = RunRecords.load(tmp_path / "attacked").excluded()
    assert {event.participant for event in excluded} == {"archive"}
    assert "the largest possible answer to the request" in excluded[0].reason
    figures = f"ServerApp: {honest / MIB:.0f} MiB, with a reply of {FLOOD:,} bytes {flooded / MIB:.0f} MiB"
    record_property("memory", figures)
    assert honest > 0, figures
    assert flooded - honest < 50_000_000, figures
