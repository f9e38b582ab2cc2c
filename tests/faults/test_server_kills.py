"""The server is killed, and the run resumed: it ends in the bits of the run to which nothing happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from struck_runs import ENGINES, ready, results

POLYFED = [sys.executable, "-c", "import sys; from polyfed.cli.main import main; sys.exit(main())"]
PATIENCE = 300.0
RANDOM_KILLS = Path(__file__).parents[2] / "benchmarks" / "kills.py"


def killed(config: dict[str, Any], folder: Path, rounds: int) -> Path:
    """A run whose process was killed after so many complete rounds."""
    command, out = beginning(config, folder), folder / "run"
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(), start_new_session=True)
    limit = time.monotonic() + PATIENCE
    try:
        while not (out / f"checkpoints/round-{rounds:06d}.json").exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < limit, (folder / "log").read_text()
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return out


def beginning(config: dict[str, Any], folder: Path) -> list[str]:
    """The command of a run of an experiment below a folder."""
    (folder / "plan.yaml").write_text(yaml.safe_dump(config, sort_keys=False))  # the order of clients matters
    return [*POLYFED, "run", str(folder / "plan.yaml"), "--out", str(folder / "run")]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}


def resumed(out: Path) -> Path:
    command = [*POLYFED, "resume", str(out), "--allow-code"]
    seen = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert seen.returncode == 0, seen.stdout + seen.stderr
    return out


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_server_resumes_to_the_same_bits(
    keeping: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path, engine: str
) -> None:
    out = killed(keeping | {"run": keeping["run"] | {"engine": ENGINES[engine]}}, tmp_path, 1)
    assert not (out / "report.md").exists()
    assert results(resumed(out)) == undisturbed


@pytest.mark.slow
def test_a_kill_in_a_step_is_resumed(keeping: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """On the local engine a client's step is the server's process: it kills it twice, in the same round."""
    config = ready(keeping, tmp_path, "local", how="kill", times=2)
    codes, again = [], [*POLYFED, "resume", str(tmp_path / "run"), "--allow-code"]
    for command in (beginning(config, tmp_path), again, again):
        codes.append(subprocess.run(command, env=environment(), capture_output=True, check=False).returncode)
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert results(tmp_path / "run") == undisturbed


@pytest.mark.slow
def test_too_few_clients_end_the_program_with_code_2_and_how_to_go_on(keeping: dict[str, Any], tmp_path: Path) -> None:
    config = ready(keeping, tmp_path, "local", how="raise", exchange={"min_clients": 3})
    seen = subprocess.run(beginning(config, tmp_path), env=environment(), capture_output=True, text=True, check=False)
    assert seen.returncode == 2
    assert "2 of 3 clients gave a usable reply to 'fit'" in seen.stderr
    assert "image: ValueError: no GPU left" in seen.stderr
    resumed(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "kinds"), [("local", 2), ("ray", 2), ("flower", 2), ("deployment", 9)])
def test_after_a_kill_of_any_process_at_a_random_moment_the_run_ends_in_the_same_bits(engine: str, kinds: int) -> None:
    """One of every kind of process."""
    command = [sys.executable, str(RANDOM_KILLS), "--kills", str(kinds), "--seed", "1", "--engines", engine]
    seen = subprocess.run(command, capture_output=True, text=True, check=False)
    assert seen.returncode == 0, seen.stdout + seen.stderr
    ended = seen.stdout.count(": same bits: killed ")
    assert ended == kinds or (engine == "local" and ended + seen.stdout.count(": refused: killed ") == kinds)
