"""A site's worker and the processes that bring it messages: either may be killed, and the other goes on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest

from polyfed.deploy.worker import call_worker, serve_errands
from polyfed.wire.limits import Frame

KILLED = """
import os, signal, sys
from pathlib import Path
from polyfed.deploy.worker import serve_errands

serve_errands(Path(sys.argv[1]), lambda *message: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.deploy.worker.START_SECONDS", 20.0)


@pytest.fixture
def address() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="worker-") as folder:  # a short path, as sockets need
        yield Path(folder) / "worker"


def echo(kind: str, fields: Any, frames: Any, config: Any) -> Any:
    return {"kind": kind, **fields, **config}, frames


@pytest.fixture
def worker(address: Path) -> Iterator[Path]:
    """Serves messages until one is the last, which it must still be able to."""
    ended = threading.Event()

    def serve(kind: str, fields: Any, frames: Any, config: Any) -> Any:
        if fields.get("last"):
            ended.set()
        return echo(kind, fields, frames, config)

    thread = threading.Thread(target=serve_errands, args=(address, serve, lambda: not ended.is_set()), daemon=True)
    thread.start()
    ask(address)  # waits until it listens
    yield address
    assert ask(address, last=True)[0]["last"]
    thread.join(10)
    assert not thread.is_alive()


def ask(address: Path, **fields: bool) -> Any:
    frame = Frame("header", [memoryview(b"abc")])
    return call_worker(str(address), "step", {"n": 1, **fields}, [frame], {"config": "x"})


def test_a_message_reaches_the_worker_and_its_reply_comes_back(worker: Path) -> None:
    fields, frames = ask(worker)
    assert fields == {"kind": "step", "n": 1, "config": "x"}
    assert [(frame.header, [bytes(raw) for raw in frame.buffers]) for frame in frames] == [("header", [b"abc"])]


@pytest.mark.parametrize(
    "messages",
    [
        *([], [b"{"], [b"[]"], [b"{}"], [b'{"layout": 5}'], [b'{"layout": [["header", 2]]}']),
        [b'{"layout": [["header", [64]]]}', b"one"],  # the worker waits for the rest of them
        *([b'{"layout": []}'], [b"\x80\x04cos\nsystem\n"], [b"[" * 100_000]),
    ],
    ids=["nothing", "no JSON", "list", "empty", "layout", "sizes", "cut off", "no kind", "pickle", "deep"],
)
def test_a_bringer_that_dies_or_talks_nonsense_does_not_end_the_worker(worker: Path, messages: list[bytes]) -> None:
    connection = Client(str(worker), family="AF_UNIX")
    for message in messages:
        connection.send_bytes(message)
    connection.close()
    assert ask(worker)[0]["n"] == 1


def test_bytes_without_a_message_do_not_end_the_worker(worker: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(worker))
        stream.sendall(b"\xff" * 64)
    assert ask(worker)[0]["n"] == 1


def test_a_worker_that_is_killed_over_a_message_is_an_error_that_can_be_mended(address: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(address)], env=dict(os.environ))
    try:
        message = r"the site's worker died in this step \((EOF|ConnectionReset)Error\)"
        with pytest.raises(ConnectionError, match=message):
            ask(address)
    finally:
        assert process.wait(30) == -9


def test_a_worker_that_does_not_come_up_is_an_error(address: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.deploy.worker.START_SECONDS", 0.3)
    with pytest.raises(ConnectionError, match="the site's worker died"):
        ask(address)
