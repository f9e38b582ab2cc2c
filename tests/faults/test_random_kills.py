"""Kills at random moments, as ``benchmarks/kills.py`` makes them: one of every kind of process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "kills.py"


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "kinds"), [("local", 2), ("ray", 2), ("flower", 2), ("deployment", 9)])
def test_whoever_is_killed_the_run_ends_in_the_same_bits(engine: str, kinds: int) -> None:
    command = [sys.executable, str(PROGRAM), "--kills", str(kinds), "--seed", "1", "--engines", engine]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    ended = found.stdout.count(": same bits: killed ")
    assert ended == kinds or (engine == "local" and ended + found.stdout.count(": refused: killed ") == kinds)
