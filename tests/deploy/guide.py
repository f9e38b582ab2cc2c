"""Runs a guide: the ``bash`` blocks of a page, in order, in one folder.

A block is run to its end and must succeed. A block below ``<!-- terminal: NAME; ready: TEXT -->`` is started in the
background instead, and the next block waits until its output has the text. All that was started is stopped at the end,
last first.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from federations import MARK, marked, ports, wait_until

_BLOCK = re.compile(
    r"(?:<!-- terminal: (?P<name>[\w-]+); ready: (?P<ready>.+?) -->\n)?^```bash\n(?P<code>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """Commands of a page.

    Attributes:
        code: Commands for bash.
        terminal: name of the terminal that they run in in the background; empty: in the foreground.
        ready: Text of the output before the next block.
    """

    code: str
    terminal: str = ""
    ready: str = ""


def blocks(page: str, replace: Mapping[str, str] | None = None) -> list[Block]:
    """The blocks of a page, with texts such as port numbers replaced."""
    for old, new in (replace or {}).items():
        page = re.sub(rf"\b{re.escape(old)}\b", new, page)
    return [Block(m["code"], m["name"] or "", m["ready"] or "") for m in _BLOCK.finditer(page)]


class Guide:
    """Carries out blocks in a folder; use it as a context.

    Attributes:
        outputs: output so far by terminal; that of the foreground is under the empty name.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = {**os.environ, **environment}
        self._terminals: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Guide:
        return self

    def __exit__(self, *problem: object) -> None:
        for terminal in reversed(list(self._terminals.values())):
            terminal.send_signal(signal.SIGINT)  # Ctrl-C
            try:
                terminal.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(terminal.pid, signal.SIGKILL)
                terminal.wait()

    @property
    def codes(self) -> dict[str, int | None]:
        """Exit code of each terminal; None while it runs."""
        return {name: terminal.poll() for name, terminal in self._terminals.items()}

    def output(self, terminal: str = "") -> str:
        path = self._log(terminal)
        return path.read_text(errors="replace") if path.exists() else ""

    def carry_out(self, block: Block, seconds: float = 600) -> None:
        """Run a block, or start it and wait until it is ready; fails with all output."""
        process = self._start(block)
        if not block.terminal:
            assert self._wait(process, seconds) == 0, f"{block.code}\n{self._everything()}"
            return
        self._terminals[block.terminal] = process
        limit = time.monotonic() + seconds
        while block.ready not in self.output(block.terminal):
            waiting = process.poll() is None and time.monotonic() < limit
            assert waiting, f"{block.code}\nnot ready: {block.ready}\n{self._everything()}"
            time.sleep(0.1)

    def _start(self, block: Block) -> subprocess.Popen[bytes]:
        # a terminal is the one command in it, so that signals reach that
        code = f"exec {block.code}" if block.terminal else f"set -eu\n{block.code}"
        with self._log(block.terminal).open("ab") as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            place: dict[str, Any] = {"cwd": self.folder, "env": self.environment, "start_new_session": True}
            return subprocess.Popen(["bash", "-c", code], **streams, **place)

    def _wait(self, process: subprocess.Popen[bytes], seconds: float) -> int | str:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"not done after {seconds:g} s"

    def _log(self, terminal: str) -> Path:
        return self.folder / f"{terminal or 'foreground'}.log"

    def _everything(self) -> str:
        return "\n".join(f"---- {name or 'foreground'}\n{self.output(name)}" for name in ("", *self._terminals))


def carried_out(page: Path, folder: Path, **more: str) -> str:
    """Output of a page's guide, done to its end on free ports; nothing of it is left."""
    (port, superlink), mark = ports(), uuid.uuid4().hex
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    common = {MARK: mark, "OMP_NUM_THREADS": "1", "PATH": path, "POLYFED_CACHE": str(folder / "cache")}
    try:
        with Guide(folder, common | more) as guide:
            for block in blocks(page.read_text(encoding="utf-8"), {"9443": str(port), "9091": str(superlink)}):
                guide.carry_out(block)
            assert set(guide.codes.values()) == {None}, "all terminals are still there"
            message = guide.output()
        assert set(guide.codes.values()) == {0}, guide.codes
    finally:
        wait_until(lambda: not marked(mark), 20, lambda: f"left: {marked(mark)}")
    return message
