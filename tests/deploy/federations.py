"""A small federation on loopback, and ways to start its processes and to see that none is left."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509

from polyfed.deploy.flower_programs import Link, free_port, link_to
from polyfed.deploy.folders import ServerFolder, SiteFolder
from polyfed.deploy.init import create_federation
from polyfed.deploy.settings import ServerAddress, load_settings
from polyfed.runs.experiment import Experiment

COMMAND = [sys.executable, "-m", "polyfed", "deploy"]
CLI = [sys.executable, "-c", "import sys; from polyfed.cli.main import main; sys.exit(main())"]
MARK = "POLYFED_TEST"
LOOPBACK = {"localhost", "127.0.0.1", "::1", "0.0.0.0", None, ""}
RECORDER = Path(__file__).parent / "recorder"


def experiment_settings() -> dict[str, Any]:
    """Texts at one site, texts and images at another, generated."""
    text = {"name": "bag", "width": 8, "view": {"name": "tokens", "length": 16}}
    image = {"name": "resnet", "widths": [4], "depths": [1], "block": "basic", "view": {"name": "pixels", "size": 16}}
    texts = {"name": "scenes", "train": 24, "test": 8, "seed": 2, "columns": {"text": "text"}}
    sources = {
        "shared": {"name": "scenes", "train": 12, "validation": 4, "test": 4, "size": 16},
        "reports": {**texts, "targets": {"topic": "topic"}},
        "films": {"name": "scenes", "train": 16, "validation": 4, "test": 4, "size": 16, "seed": 1},
    }
    topic, alone, both = {"name": "classification", "target": "topic"}, {"text": text}, {"image": image, "text": text}
    return {
        "name": "small",
        "data": {"sources": sources},
        "public": {"source": "shared", "items": 6},
        "clients": {
            "archive": {"count": 1, "source": "reports", "task": topic, "model": {"dim": 8, "encoders": alone}},
            "hospital": {"count": 2, "source": "films", "task": "retrieval", "model": {"dim": 8, "encoders": both}},
        },
        "algorithm": {"name": "fedavg", "local_epochs": 1},
        "run": {"rounds": 1, "threads": 1, "device": "cpu"},
    }


GERMAN = ("und die Leber ist gut,a", "ein Befund der Lunge,b")


def write_letters(path: Path, rows: Sequence[str], times: int, header: str = "text,topic") -> None:
    """A table of these rows, each so many times with a number of its own."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([header, *(f"{number} {row}" for number in range(times) for row in rows)]))


def with_files(folder: Path) -> dict[str, Any]:
    """The experiment with the archive's texts, which are German, as a table."""
    write_letters(folder / "letters.csv", GERMAN, 20)
    settings = experiment_settings()
    columns = {"columns": {"text": "text"}, "targets": {"topic": "topic"}}
    settings["data"]["sources"]["reports"] = {"name": "folder", "path": "letters.csv", **columns}
    settings["data"]["dir"] = str(folder)
    return settings


class Started:
    """A process with its output in a file; it is the head of a session, so that nothing else can be hit."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as stream:
            variables = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {})
            streams: dict[str, Any] = {"stdout": stream, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(command, **streams, env=variables, start_new_session=True)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 90.0, *, times: int = 1) -> None:
        def complaint() -> str:
            return f"no {text!r} (x{times}) from exit code {self.process.poll()}:\n{self.output}"

        wait_until(lambda: self.output.count(text) >= times, seconds, complaint)

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
    seen = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                seen[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return seen


def marked(mark: str) -> list[str]:
    return [*marked_processes(mark).values()]


def ports() -> tuple[int, int]:
    first = free_port()
    second = free_port()
    return (first, second) if first != second else ports()


# ---- folders, and a federation that is served


@dataclass(frozen=True)
class Folders:
    path: Path

    @property
    def server(self) -> ServerFolder:
        return ServerFolder(self.path / "server")

    @property
    def address(self) -> ServerAddress:
        return load_settings(ServerAddress, self.server.settings)

    @property
    def link(self) -> Link:
        return link_to(self.server, self.address)

    def site(self, name: str) -> SiteFolder:
        return SiteFolder(self.path / name)


@dataclass(frozen=True)
class Live:
    folders: Folders
    process: Started
    environment: dict[str, str]
    logs: Path


def make(path: Path, *, keys: bool = True, settings: dict[str, Any] | None = None) -> Folders:
    port, superlink = ports()
    experiment = Experiment.load(settings or experiment_settings())
    create_federation(path, experiment, ["localhost"], port=port, superlink_port=superlink, keys=keys)
    return Folders(path)


@contextlib.contextmanager
def served(folders: Folders, logs: Path) -> Iterator[Live]:
    """The federation while it is served, all its processes marked; in the end nothing of it is left."""
    mark = uuid.uuid4().hex
    environment = {MARK: mark}
    with started("server", str(folders.server.path), log=logs / "server.log", environment=environment) as process:
        process.wait_for("open for sites")
        yield Live(folders, process, environment, logs)
    wait_until(lambda: not marked(mark), 10, lambda: f"left: {marked(mark)}")


def models(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "models").rglob("*.safetensors"))}


def spent(folder: Path) -> dict[str, list[Any]]:
    """Client -> its account: what each reply cost."""
    lines = {path.stem: path.read_text().splitlines() for path in folder.rglob(".privacy/*.jsonl")}
    costs = {name: [json.loads(line)["cost"] for line in own] for name, own in lines.items()}
    return {name: [cost for cost in own if cost is not None] for name, own in costs.items()}


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Names and addresses that a certificate is valid for."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return tuple(str(name.value) for name in names)


def python_path(folder: Path) -> str:
    """PYTHONPATH on which a folder stands first."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


# ---- look-ups and connections of Python processes, as ``recorder/sitecustomize.py`` writes them down


class Record(NamedTuple):
    event: str
    place: str
    program: str

    @property
    def host(self) -> str | None:
        """Name or address; None for a socket in the file system."""
        value = ast.literal_eval(self.place)
        value = value[0] if isinstance(value, tuple) else value
        value = value.decode(errors="replace") if isinstance(value, bytes) else value
        return None if value is None or value.startswith(("/", "\0")) else str(value)


def recording(folder: Path) -> dict[str, str]:
    """Environment of processes that are to be recorded into a new folder."""
    folder.mkdir()
    return {"POLYFED_RECORD": str(folder), "PYTHONPATH": python_path(RECORDER)}


def recorded(folder: Path) -> list[Record]:
    return [Record(*line.split("\t")) for path in folder.glob("*.txt") for line in path.read_text().splitlines()]


def outside(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.host not in LOOPBACK]
