"""``polyfed watch`` during a real run."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from polyfed.cli.main import main
from polyfed.reporting.progress import LiveProgress
from polyfed.runs.events import follow


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What ``watch`` draws."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, height=30, color_system=None)
    monkeypatch.setattr("polyfed.cli.running.terminal", lambda: console)
    return stream


@pytest.mark.slow  # a process that starts; the test below follows a log to its end in this one
def test_a_run_is_watched_to_its_end(tiny: dict[str, Any], tmp_path: Path, shown: io.StringIO) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny | {"run": {**tiny["run"], "output": {"plots": False}}}))
    command = [sys.executable, "-m", "polyfed", "run", "tiny.yaml", "--out", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "run" / "metrics.jsonl").exists():  # measurements that the log repeats
            assert process.poll() is None
            time.sleep(0.05)
        assert main(["watch", str(tmp_path / "run")]) == 0
        assert process.wait() == 0
    text = shown.getvalue()
    assert "tiny" in text
    assert "report.html" in text[text.index("\x1b[?25h") :]


def test_a_log_is_shown_to_its_end(tiny_run: Path, tmp_path: Path) -> None:
    calls = [
        {"event": "RunStarted", "name": "tiny", "rounds": 1, "clients": 3, "done": 0},
        {"event": "Measured", "round": 0, "participant": "server", "kind": "train", "metrics": {"loss": 1.0}},
        {"event": "RoundStarted", "round": 1, "cohort": ["paired-0"]},
        {"event": "RunComplete"},
    ]
    log, stream = tmp_path / "progress.jsonl", io.StringIO()
    log.write_text("".join(json.dumps({"at": 1.0 + k, **call}) + "\n" for k, call in enumerate(calls)))
    progress = LiveProgress(Console(file=stream, force_terminal=True, width=100))
    assert follow(log, progress, tiny_run, finished=lambda: True)
    progress.close()
    assert "tiny: 1 rounds, 3 clients" in stream.getvalue()
    assert "report.html" in stream.getvalue()
