"""``polyfed watch`` beside a real run."""

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
from polyfed.reporting.run_picture import RunPicture
from polyfed.runs.event_log import follow
from polyfed.runs.events import Event
from polyfed.runs.records import RunRecords


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What ``watch`` draws."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, height=30, color_system=None)
    monkeypatch.setattr("polyfed.cli.running.terminal", lambda: console)
    return stream


@pytest.mark.slow  # a process that starts; the test below follows a log to its end in this one
def test_a_run_is_watched_to_its_end(tiny: dict[str, Any], tmp_path: Path, shown: io.StringIO) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny | {"run": {**tiny["run"], "plots": False}}))
    command = [sys.executable, "-m", "polyfed.cli", "run", "tiny.yaml", "--out", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "run" / "metrics.jsonl").exists():  # measurements that the log tells anew
            assert process.poll() is None
            time.sleep(0.05)
        assert main(["watch", str(tmp_path / "run")]) == 0
        assert process.wait() == 0
    text = shown.getvalue()
    assert "tiny" in text
    assert "report.html" in text[text.index("\x1b[?25h") :]


def test_every_moment_of_a_run_can_be_drawn_over_its_records(tiny_run: Path, tmp_path: Path) -> None:
    """The log is replayed from its first call over what the records told: each picture on the way is drawn."""
    drawn: list[str] = []

    class Drawing(LiveProgress):
        def handle(self, event: Event) -> None:
            super().handle(event)
            Console(file=io.StringIO(), width=100, height=30).print(RunPicture(self.state))
            drawn.append(type(event).__name__)

    log = tmp_path / "progress.jsonl"
    calls = [
        {"event": "RunStarted", "name": "tiny", "rounds": 1, "clients": 3, "done": 0},
        {"event": "Measured", "round": 0, "participant": "server", "kind": "train", "metrics": {"loss": 1.0}},
        {"event": "RoundStarted", "round": 1, "cohort": ["paired-0"]},
        {"event": "RunComplete"},
    ]
    log.write_text("".join(json.dumps({"at": 1.0 + k, **call}) + "\n" for k, call in enumerate(calls)))
    progress = Drawing(Console(file=io.StringIO(), force_terminal=True), RunRecords.load(tiny_run))
    try:
        assert follow(log, progress, tiny_run, finished=lambda: True)
    finally:
        progress.close()
    assert drawn == [call["event"] for call in calls]
