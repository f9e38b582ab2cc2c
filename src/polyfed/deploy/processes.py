"""Processes that end with their parent, together with all their descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from polyfed.core.errors import RunError

FAMILY_VARIABLE = "POLYFED_FAMILY"
"""Environment variable that marks all descendants of a ``Processes``, whatever session or parent they have."""

_GRACE = 8.0  # seconds: Flower's programs take up to five to end
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class Processes:
    """Starts programs, each in a session of its own, and stops them with all descendants on leaving the block.

    On Linux, SIGKILL of this process also stops them: the kernel then signals the programs, and Flower's programs
    watch their parents.
    """

    def __init__(self) -> None:
        self.family = uuid.uuid4().hex
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        """Start a program in ``folder``; it inherits this process's stdout and stderr.

        Raises:
            RunError: it cannot be started.
        """
        try:
            self.running[name] = subprocess.Popen(
                command,
                env={**environment, FAMILY_VARIABLE: self.family},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a process group that can be signalled
                preexec_fn=_die_with_parent(os.getpid()),
            )
        except OSError as error:
            raise RunError(f"cannot start {name} ({command[0]}): {error.strerror}") from error

    def ended(self) -> dict[str, int]:
        codes = {name: process.poll() for name, process in self.running.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def stop(self, grace: float = _GRACE) -> None:
        """Terminate all processes, and kill those that have not ended within ``grace`` seconds."""
        self._signal(signal.SIGTERM)
        limit = time.monotonic() + grace
        while len(self.ended()) < len(self.running) or offspring(self.family):
            if time.monotonic() > limit:
                break
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        for process in self.running.values():
            process.wait()
        self.running.clear()

    def _signal(self, number: signal.Signals) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        for pid in offspring(self.family):  # includes those in other sessions
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def offspring(family: str) -> list[int]:
    """Ids of the live processes of a family; empty without /proc, where process groups must do."""
    mark = f"{FAMILY_VARIABLE}={family}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):  # empty for a process that has ended
                pids.append(int(folder.name))
    return pids


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that SIGTERM or SIGINT sets within the block; only for the main thread."""
    event = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        event.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield event
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def free_port() -> int:
    """A free port on 127.0.0.1."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """First action of a child, so that the kernel sends it SIGTERM when this process dies; Linux only."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # looked up before the fork

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return ask
