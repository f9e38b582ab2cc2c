"""Nothing that is started outlives who started it: not by a signal, not by a kill, not in a session of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from federations import MARK, Started, marked, wait_until

from polyfed.core.errors import RunError
from polyfed.deploy.flower_programs import Processes, offspring, stopping

SLEEP = "import time; time.sleep(600)"
DETACHED = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
time.sleep(600)
"""
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); {SLEEP}"
WRAPPER = """
import os, sys, time
from pathlib import Path
from polyfed.deploy.flower_programs import Processes, stopping
with stopping() as stop, Processes() as processes:
    processes.start("it", [sys.executable, "-c", sys.argv[1]], os.environ, Path("."))
    print("started", flush=True)
    stop.wait()
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="counts processes through /proc")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_detached_grandchild_ends_too(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start("parent", python(DETACHED), os.environ, tmp_path)
        wait_until(lambda: len(offspring(processes.family)) == 2, 20, lambda: str(offspring(processes.family)))
        family = processes.family
    assert offspring(family) == []
    assert processes.running == {}


def test_who_ignores_a_polite_request_is_killed(tmp_path: Path) -> None:
    processes = Processes()
    processes.start("stubborn", python(STUBBORN), os.environ, tmp_path)
    wait_until(lambda: len(offspring(processes.family)) == 1, 20, lambda: "not started")
    time.sleep(0.5)
    before = time.monotonic()
    processes.stop(grace=0.5)
    assert 0.4 < time.monotonic() - before < 10
    assert offspring(processes.family) == []


def test_a_process_that_ends_by_itself_is_reported_with_its_code(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start("short", python("raise SystemExit(7)"), os.environ, tmp_path)
        processes.start("long", python(SLEEP), os.environ, tmp_path)
        wait_until(lambda: bool(processes.ended()), 20, lambda: "still runs")
        assert processes.ended() == {"short": 7}


def test_an_exception_in_the_block_stops_them_too(tmp_path: Path) -> None:
    processes = Processes()

    def block() -> None:
        with processes:
            processes.start("it", python(SLEEP), os.environ, tmp_path)
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert offspring(processes.family) == []


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with Processes() as processes, pytest.raises(RunError, match=r"cannot start SuperLink .*absent"):
        processes.start("SuperLink", [str(tmp_path / "absent")], os.environ, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_to_the_wrapper_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    if number is signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux signals children at their parent's death")
    mark = uuid.uuid4().hex
    wrapper = Started([*python(WRAPPER), SLEEP], tmp_path / "log", {MARK: mark})
    try:
        wrapper.wait_for("started", 30)
        wait_until(lambda: len(marked(mark)) == 2, 20, lambda: str(marked(mark)))
        wrapper.process.send_signal(number)
        wrapper.process.wait(30)
        wait_until(lambda: not marked(mark), 20, lambda: f"left: {marked(mark)}")
    finally:
        wrapper.process.kill()


def test_stopping_restores_the_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with stopping() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(5)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_other_processes_are_not_offspring() -> None:
    other = subprocess.Popen(python(SLEEP))
    try:
        assert offspring(uuid.uuid4().hex) == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
