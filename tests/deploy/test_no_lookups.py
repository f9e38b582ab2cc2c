"""A federation contacts only itself: no name is looked up and nothing outside loopback is contacted.

Python processes write down their own look-ups and connections (an audit hook); strace, where it may be used, sees all
processes, Caddy and libraries in C among them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from federations import COMMAND, MARK, Record, Started, make, marked, outside, recorded, recording, wait_until

from polyfed.deploy.check import check_site

pytestmark = pytest.mark.slow


def strace() -> list[str]:
    """Prefix of a command that traces it and its offspring; empty where that is impossible."""
    program = shutil.which("strace")
    if program is None:
        return []
    command = [program, "-D", "-f", "-qq", "--seccomp-bpf", "-e", "trace=connect,sendto,sendmsg,sendmmsg"]
    tried = subprocess.run([*command, "-o", "/dev/null", sys.executable, "-c", ""], capture_output=True, check=False)
    return command if tried.returncode == 0 else []


@dataclass(frozen=True)
class Traces:
    """Records of one complete cycle.

    Attributes:
        python: Events of Python processes.
        system: lines of strace, or None without it.
    """

    python: list[Record]
    system: list[str] | None


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """Server and gate, a site that comes online, a registration, a list, a check, and the end of it all."""
    folder = tmp_path_factory.mktemp("cycle")
    folders = make(folder / "federation")
    records, mark, tracer = folder / "records", uuid.uuid4().hex, strace()
    environment = {MARK: mark, **recording(records)}

    def start(name: str, *arguments: str) -> Started:
        traced = [*tracer, "-o", str(folder / f"{name}.strace")] if tracer else []
        return Started([*traced, *COMMAND, *arguments], folder / f"{name}.log", environment)

    server = start("server", "server", str(folders.server.path))
    site = None
    try:
        server.wait_for("open for sites", 180)
        site = start("site", "site", str(folders.site("archive").path))
        site.wait_for("connected to", 180)
        assert [node["status"] for node in folders.link.nodes()].count("online") == 1
        assert not [finding for finding in check_site(folders.site("archive").path) if finding.level == "error"]
    finally:
        for process in (site, server):
            if process is not None:
                process.stop(seconds=60)
    wait_until(lambda: not marked(mark), 20, lambda: f"left: {marked(mark)}")
    system = [line for path in folder.glob("*.strace") for line in path.read_text(errors="replace").splitlines()]
    return Traces(recorded(records), system if tracer else None)


def test_python_processes_look_nothing_up_and_stay_on_loopback(cycle: Traces) -> None:
    assert outside(cycle.python) == []


def test_the_recorder_saw_all_programs(cycle: Traces) -> None:
    """Otherwise the test above would show nothing."""
    assert {"flower-superexec", "connection.py", "flwr"} <= {Path(record.program).name for record in cycle.python}
    assert any(record.event == "socket.getaddrinfo" for record in cycle.python)


def test_no_process_leaves_loopback(cycle: Traces) -> None:
    if cycle.system is None:
        pytest.skip("strace is not there or may not trace; Caddy was not watched")
    internet = [line for line in cycle.system if "AF_INET" in line]
    assert internet, "strace saw nothing"
    inside = re.compile(r'inet_addr\("127\.|inet_pton\(AF_INET6, "(::1|::ffff:127\.[\d.]+)"')
    assert [line for line in internet if not inside.search(line)] == []
    assert [line for line in internet if "htons(53)" in line] == [], "a name server was asked"


def test_a_look_up_would_have_been_seen(tmp_path: Path) -> None:
    code = "import socket\ntry: socket.create_connection(('nowhere.invalid', 9), 1)\nexcept OSError: pass"
    records = tmp_path / "records"
    subprocess.run([sys.executable, "-c", code], env=recording(records), check=True, timeout=60)
    shown = outside(recorded(records))
    assert [(record.event, record.host) for record in shown] == [("socket.getaddrinfo", "nowhere.invalid")]
