"""A small federation on loopback, and ways to start its processes and to see that none is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from polyfed.deploy.processes import free_port

COMMAND = [sys.executable, "-m", "polyfed.cli", "deploy"]
CLI = [sys.executable, "-c", "import sys; from polyfed.cli.main import main; sys.exit(main())"]
MARK = "POLYFED_TEST"


def experiment_settings() -> dict[str, Any]:
    """Texts at one site, texts and pictures at another; generated in a blink."""
    text = {"name": "bag", "width": 8, "view": {"name": "tokens", "length": 16}}
    image = {"name": "resnet", "widths": [4], "depths": [1], "block": "basic", "view": {"name": "pixels", "size": 16}}
    texts = {"name": "scenes", "train": 24, "test": 8, "seed": 2, "columns": {"text": "text"}}
    return {
        "name": "small",
        "data": {
            "sources": {
                "shared": {"name": "scenes", "train": 12, "validation": 4, "test": 4, "size": 16},
                "reports": {**texts, "targets": {"topic": "topic"}},
                "films": {"name": "scenes", "train": 16, "validation": 4, "test": 4, "size": 16, "seed": 1},
            }
        },
        "public": {"source": "shared", "items": 6},
        "clients": {
            "archive": {
                "count": 1,
                "source": "reports",
                "task": {"name": "classification", "target": "topic"},
                "model": {"dim": 8, "encoders": {"text": text}},
            },
            "hospital": {
                "count": 2,
                "source": "films",
                "task": "retrieval",
                "model": {"dim": 8, "encoders": {"image": image, "text": text}},
            },
        },
        "algorithm": {"name": "fedavg", "local_epochs": 1},
        "run": {"rounds": 1, "threads": 1, "device": "cpu"},
    }


class Started:
    """A process with its output in a file; it is the head of a session, so that nothing else can be hit."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 90.0, *, times: int = 1) -> None:
        wait_until(
            lambda: self.output.count(text) >= times,
            seconds,
            lambda: f"no {text!r} (x{times}) from exit code {self.process.poll()}:\n{self.output}",
        )

    def stop(self, number: int = signal.SIGTERM, seconds: float = 40.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)


def completed(server: Started, *arguments: str, environment: Mapping[str, str], cwd: Path | None = None) -> None:
    """``polyfed <arguments>`` to its end, which is a good one."""
    command, variables = [*CLI, *arguments], os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment)
    done = subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + server.output


@contextlib.contextmanager
def started(*arguments: str, log: Path, environment: Mapping[str, str] | None = None) -> Iterator[Started]:
    """``polyfed deploy <arguments>`` in the background, stopped on leaving the block."""
    running = Started([*COMMAND, *arguments], log, environment)
    try:
        yield running
    finally:
        try:
            running.stop()
        except subprocess.TimeoutExpired:
            running.process.kill()
            raise


def wait_until(condition: Callable[[], bool], seconds: float, complaint: Callable[[], str]) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, complaint()
        time.sleep(0.1)


def marked_processes(mark: str) -> dict[int, str]:
    """Number -> command line, of the live processes whose environment has ``POLYFED_TEST=<mark>``."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def marked(mark: str) -> list[str]:
    return [*marked_processes(mark).values()]


def ports() -> tuple[int, int]:
    first = free_port()
    second = free_port()
    return (first, second) if first != second else ports()
