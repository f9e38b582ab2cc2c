"""A real browser, driven through the DevTools protocol over a pipe (no port, no dependency)."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
PROGRAM = next((found for found in map(shutil.which, NAMES) if found), None)
FLAGS = [
    f"--{name}"
    for name in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "remote-debugging-pipe",
        "window-size=1280,900",
    )
]
PATIENCE = 60.0


class Browser:
    """One page of one browser process."""

    def __init__(self, profile: Path) -> None:
        commands, self._send = (_high(end) for end in os.pipe())
        self._receive, answers = (_high(end) for end in os.pipe())

        def wire() -> None:  # the browser reads from descriptor 3 and writes to 4
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        self._process = subprocess.Popen(
            [PROGRAM or "", *FLAGS, f"--user-data-dir={profile}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=wire,
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._number, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._send)
            os.close(self._receive)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.next_event()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, page: Path | str) -> None:
        self.events.clear()
        assert "errorText" not in self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not self.named("Page.loadEventFired"):
            self.events.append(self.next_event())

    def named(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event.get("method") == method]

    def js(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def mouse(self, selector: str, *kinds: str, at: tuple[float, float] = (0.5, 0.5)) -> None:
        """Real mouse events, at a share of an element's width and height."""
        x, y = self.js(
            f"(() => {{ const e = {selector}; e.scrollIntoView({{block: 'center', behavior: 'instant'}}); "
            f"const r = e.getBoundingClientRect(); "
            f"return [r.x + {at[0]} * r.width, r.y + {at[1]} * r.height]; }})()"
        )
        for kind in kinds:
            button = "none" if kind == "mouseMoved" else "left"
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def click(self, selector: str) -> None:
        self.mouse(selector, "mouseMoved", "mousePressed", "mouseReleased")

    def complaints(self) -> list[dict[str, Any]]:
        """What went wrong on the page since it was opened."""
        self.js("0")  # events up to now are in
        logged = [entry for entry in self.named("Log.entryAdded") if entry["entry"]["level"] in ("error", "warning")]
        printed = [entry for entry in self.named("Runtime.consoleAPICalled") if entry["type"] in ("error", "warning")]
        return self.named("Runtime.exceptionThrown") + logged + printed

    def next_event(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, until - time.monotonic()))
            chunk = os.read(self._receive, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError(f"the browser {'has closed the pipe' if ready else 'does not answer'}")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


def _high(descriptor: int) -> int:
    """The same pipe end beyond the descriptors that the browser expects, closed in child processes."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
