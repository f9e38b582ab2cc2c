"""Kills at random moments: every run that was killed and resumed must end in the bits of one that was not.

    python benchmarks/kills.py --kills 20 --seed 0

SIGKILL goes to processes of the server and of clients, on every engine: where the server was killed, the run is
resumed until it is done; where a client's process was killed, the run must go on by itself. Metrics, ledger, models and
checkpoints are compared, byte by byte, with those of the undisturbed run on the same engine; in one of the methods
clients are at work while the server goes on. The exit code is 1 if any differ.

A victim "power" is the server whose logs lose their ends with it, as a disk that loses its power may forget what was
not flushed, or keep zeros in its place. Then a run may also refuse to go on, if it says what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from polyfed.deploy.processes import free_port

POLYFED = [sys.executable, "-c", "import sys; from polyfed.cli.main import main; sys.exit(main())"]
PATIENCE = 900.0  # seconds until a run counts as hung
ROUNDS = 4
PAUSE = 5.0  # seconds before a resume; the half that was not killed may still be at work
ATTEMPTS = 10  # runs and resumes until one must be done
METHODS: dict[str, dict[str, Any]] = {
    "creamfl": {"name": "creamfl", "local_epochs": 1, "contrast": {"batch_size": 16}},
    "fedavg": {"name": "fedavg", "local_epochs": 1},
    "late": {"name": "fedavg", "local_epochs": 1},
}
PACES = {"late": {"name": "buffered", "replies": 1, "clients": {"name": "drawn", "skew": 10}}}
"""Method -> its pace, in virtual time: none in a deployment, whose time is real."""
ENGINES: dict[str, dict[str, Any]] = {
    "local": {"name": "local"},
    "ray": {"name": "ray", "workers": 2},
    "flower": {"name": "flower", "nodes": 2},
    "deployment": {},
}
VICTIMS = {  # what a process is called in its command line; the one that was started here is "server"
    "local": {"server": "", "power": ""},
    "ray": {"server": "", "worker": "ray::Worker"},
    "flower": {"server": "", "actor": "ray::ClientAppActor"},
    "deployment": {
        "server": "",
        "ServerApp": "flwr-serverapp",
        "site's worker": "polyfed.deploy.worker",
        "site's connection": "polyfed.deploy.connection",
        "SuperLink": "polyfed.deploy.superlink",
        "SuperExec": "flower-superexec",
        "site's supervisor": "deploy site",
        "gate": "caddy run",
        "server's supervisor": "deploy server",
    },
}
MISSED = "MISSED"
ENDS_THE_RUN = ("server", "power", "ServerApp", "SuperLink", "SuperExec", "gate", "server's supervisor")
LOST = 1500  # bytes that the end of a log may lose with the power
REFUSAL = "restore it from a copy"  # what a run says that misses a part of its logs


def experiment(method: str, engine: str) -> dict[str, Any]:
    """Three clients of two kinds, 72 generated scenes, four rounds."""
    pixels = {"name": "pixels", "size": 16}
    image = {"name": "resnet", "widths": [8, 8], "depths": [1, 1], "block": "basic", "view": pixels}
    text = {"name": "bag", "width": 8, "view": {"name": "tokens", "length": 16}}
    both = {"dim": 8, "encoders": {"image": image, "text": text}}
    one = {"dim": 8, "encoders": {"image": image}}
    training = {"optimizer": {"kind": "adam", "lr": 0.01}, "batch_size": 16}
    scenes = {"name": "scenes", "train": 48, "validation": 12, "test": 12, "size": 16}
    private = {"name": "scenes", "train": 24, "validation": 8, "test": 8, "size": 16, "seed": 1}
    common = {"training": training, "source": "scenes"}
    pace = {"pace": PACES[method]} if method in PACES else {}
    run = {"rounds": ROUNDS, "threads": 1, "device": "cpu", "output": {"plots": False}}
    return {
        "name": "kills",
        "data": {"sources": {"scenes": scenes, "private": private}},
        "public": {"source": "scenes", "items": 16},
        "server": {**common, "model": both, "task": "retrieval"},
        "clients": {
            "paired": {**common, "count": 2, "model": both, "task": "retrieval"},
            "image": {**common, "count": 1, "source": "private", "model": one, "task": "classification"},
        },
        "algorithm": METHODS[method],
        "run": run | ({"engine": ENGINES[engine]} if ENGINES[engine] else {}) | pace,
    }


def digest(folder: Path) -> str:
    """SHA-256 over metrics, ledger, models and checkpoints."""
    found = hashlib.sha256()
    for path in [
        folder / "metrics.jsonl",
        folder / "ledger.jsonl",
        *sorted((folder / "models").rglob("*.safetensors")),
        *sorted((folder / "checkpoints").glob("*.safetensors")),
    ]:
        found.update(path.read_bytes())
    return found.hexdigest()


@dataclass
class Started:
    """A program in a session of its own, and all that it starts; nothing of it outlasts the block."""

    command: Sequence[str]
    log: Path
    environment: dict[str, str]
    process: psutil.Popen = field(init=False)
    family: dict[int, psutil.Process] = field(default_factory=dict)

    def __enter__(self) -> Started:
        with self.log.open("ab") as stream:
            self.process = psutil.Popen(
                self.command, stdout=stream, stderr=stream, env=self.environment, start_new_session=True
            )
        return self

    def __exit__(self, *problem: object) -> None:
        self.look()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(psutil.TimeoutExpired):
                self.process.wait(30)
        _, left = psutil.wait_procs(self.family.values(), timeout=20)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=20)

    def look(self) -> list[psutil.Process]:
        """All that it started and that lives, itself included."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [self.process, *self.process.children(recursive=True)]:
                self.family[process.pid] = process
        return [process for process in self.family.values() if process.is_running()]

    def called(self, name: str) -> list[psutil.Process]:
        """Processes whose command line has this in it; to look for new ones takes long, so known ones are preferred."""
        known = [process for process in self.family.values() if name in " ".join(_command(process))]
        return known or [process for process in self.look() if name in " ".join(_command(process))]

    def ended(self, seconds: float = PATIENCE, meanwhile: Callable[[], None] = lambda: None) -> int:
        """The exit code; the family is watched meanwhile, and something done."""
        limit = time.monotonic() + seconds
        while self.process.poll() is None:
            if time.monotonic() > limit:
                raise TimeoutError(
                    f"hung for {seconds:g} s: {' '.join(self.command[-3:])}: {self.log.read_text()[-2000:]}"
                )
            self.look()
            meanwhile()
            time.sleep(0.1)
        return int(self.process.returncode)


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return []


@dataclass
class Place:
    """Where the runs of one engine happen.

    Attributes:
        engine: its name here.
        folder: of everything.
        programs: what serves it beside the run: server and sites of a deployment.
    """

    engine: str
    folder: Path
    programs: dict[str, Started] = field(default_factory=dict)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    known: dict[str, tuple[str, float]] = field(default_factory=dict)  # method -> digest, seconds a round

    @property
    def environment(self) -> dict[str, str]:
        quiet = {"OMP_NUM_THREADS": "1", "POLYFED_CACHE": str(self.folder / "cache")}
        return {**os.environ, **quiet}

    def config(self, method: str) -> list[str]:
        """What is run: a file, and what is changed of it."""
        if self.engine != "deployment":
            path = self.folder / f"{method}.yaml"
            path.write_text(yaml.safe_dump(experiment(method, self.engine)))
            return [str(path)]
        settings = [f"{key}={json.dumps(value)}" for key, value in METHODS[method].items()]
        changes = [part for setting in settings for part in ("--set", f"algorithm.{setting}")]
        return [str(self.federation / "server" / "experiment.yaml"), *changes]

    @property
    def federation(self) -> Path:
        return self.folder / "federation"

    def open(self) -> None:
        """Bring a deployment up."""
        if self.engine != "deployment":
            return
        (self.folder / "plan.yaml").write_text(yaml.safe_dump(experiment("creamfl", "deployment")))
        hosts = ["--host", "localhost", "--host", "127.0.0.1", "--keys"]
        ports = ["--port", str(free_port()), "--superlink-port", str(free_port())]
        made = [*POLYFED, "deploy", "init", str(self.folder / "plan.yaml"), str(self.federation)]
        subprocess.run([*made, *hosts, *ports], check=True, env=self.environment, stdout=subprocess.DEVNULL)
        for site in ("paired", "image"):
            path = self.federation / site / "site.yaml"
            path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"algorithms": []}))
            self.start(site, "site", str(self.federation / site))
        self.serve()

    def serve(self) -> None:
        """Start the server of the deployment, again whenever it has ended, and wait until it is open."""
        log = self.folder / "server.log"
        before = log.read_text().count("open for sites") if log.exists() else 0
        limit = time.monotonic() + PATIENCE
        while not log.exists() or log.read_text().count("open for sites") <= before:
            self.keep("server", "server", str(self.federation / "server"))
            if time.monotonic() > limit:
                raise TimeoutError(f"the server does not open: {log.read_text()[-2000:]}")
            time.sleep(0.2)

    def keep(self, name: str, *arguments: str) -> None:
        """Start a program unless it runs."""
        if name not in self.programs or self.programs[name].process.poll() is not None:
            self.start(name, *arguments)

    def start(self, name: str, *arguments: str) -> None:
        started = Started([*POLYFED, "deploy", *arguments], self.folder / f"{name}.log", self.environment)
        self.programs[name] = self.stack.enter_context(started)

    def keep_up(self) -> None:
        """What an operator's supervisor does at the server: start it again if it has ended."""
        self.keep_sites_up()
        if "server" in self.programs and self.programs["server"].process.poll() is not None:
            self.serve()

    def keep_sites_up(self) -> None:
        """What a supervisor does at each site, at any time."""
        for name in self.programs.keys() - {"server"}:
            self.keep(name, "site", str(self.federation / name))

    def started(self, *arguments: str) -> Started:
        return Started([*POLYFED, *arguments], self.folder / "runs.log", self.environment)

    def undisturbed(self, method: str) -> tuple[str, float]:
        """Digest of the run to which nothing happens, and its seconds a round."""
        if method not in self.known:
            out = self.folder / f"{method}-undisturbed"
            with self.started("run", *self.config(method), "--out", str(out)) as run:
                if run.ended():
                    raise RuntimeError(f"the undisturbed run failed: {run.log.read_text()[-2000:]}")
            lines = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()]
            self.known[method] = digest(out), statistics.median(line["seconds"] for line in lines)  # the first is long
        return self.known[method]


@dataclass(frozen=True)
class Kill:
    """One kill: of whom, and when, in rounds since the run had begun."""

    number: int
    engine: str
    method: str
    victim: str
    moment: float


def drawn(count: int, engines: Sequence[str], seed: int) -> list[Kill]:
    """Kills in turn over engines, their victims and methods, at random moments."""
    stream, kills = random.Random(seed), []
    turns = {engine: 0 for engine in engines}
    for number in range(count):
        engine = engines[number % len(engines)]
        names = list(VICTIMS[engine])
        methods = [name for name in METHODS if engine != "deployment" or name not in PACES]
        victim = names[turns[engine] % len(names)]
        method = methods[turns[engine] // len(names) % len(methods)]
        turns[engine] += 1
        kills.append(Kill(number, engine, method, victim, stream.uniform(0, ROUNDS)))
    return kills


def suffered(kill: Kill, place: Place) -> str:
    """What came of a kill; one that comes too late to hit anybody is made again, earlier."""
    while (outcome := _suffered(kill, place)).startswith(MISSED) and kill.moment > 0.1:
        kill = replace(kill, moment=kill.moment / 2)
    return outcome


def _suffered(kill: Kill, place: Place) -> str:
    """What came of a kill, and of all resumes until the run was done."""
    expected, seconds = place.undisturbed(kill.method)
    out = place.folder / f"run-{kill.number}-{kill.moment:.3f}"
    hit, codes = "", []
    with place.started("run", *place.config(kill.method), "--out", str(out)) as run:
        hit = struck(kill, place, run, seconds, out)
        codes.append(run.ended(meanwhile=place.keep_sites_up))
    missing = lose_tails(out, random.Random(kill.number)) if hit and kill.victim == "power" else ""
    told = ""
    while codes[-1] and len(codes) < ATTEMPTS and not (missing and REFUSAL in told):
        time.sleep(PAUSE)
        place.keep_up()
        before = (place.folder / "runs.log").stat().st_size
        again = ["resume", str(out)] if (out / "run.json").is_file() else None
        with place.started(*(again or ["run", *place.config(kill.method), "--out", str(out)])) as run:
            codes.append(run.ended(meanwhile=place.keep_sites_up))
        told = (place.folder / "runs.log").read_bytes()[before:].decode(errors="replace")
    place.keep_up()
    same = not codes[-1] and digest(out) == expected
    resumed = kill.victim in ENDS_THE_RUN or len(codes) == 1  # a client's death must not end a run
    shutil.rmtree(out / "models", ignore_errors=True)
    verdict = "same bits" if same and resumed and hit else MISSED if not hit else "DIFFERENT"
    if missing and codes[-1]:
        verdict = "refused" if REFUSAL in told else "DIFFERENT"
    return f"{verdict}: {hit}{missing}; exit codes {codes}"


def lose_tails(out: Path, stream: random.Random) -> str:
    """Cut the ends off the logs of a run that was killed, or put zeros in their place; what was done."""
    done = []
    for log in sorted(out.glob("*.jsonl")):
        size = log.stat().st_size
        left = max(size - stream.randrange(LOST), 0)
        zeros = stream.random() < 0.5
        with log.open("r+b") as opened:
            opened.truncate(left)
            opened.truncate(size if zeros else left)
        done.append(f"{log.stem} {left} of {size} bytes{' and zeros' if zeros else ''}")
    return f", left {', '.join(done)}"


def struck(kill: Kill, place: Place, run: Started, seconds: float, out: Path) -> str:
    """Kill a process of the victim's kind at the moment, or as soon as there is one after it."""
    whole, part = divmod(kill.moment, 1.0)
    moment = float("inf")
    while run.process.poll() is None:
        if moment == float("inf") and (out / "run.json").is_file() and rounds(out) >= whole:
            moment = time.monotonic() + part * seconds
            run.look()
        if time.monotonic() >= moment and (found := _victims(kill, place, run)):
            process = random.Random(kill.number).choice(found)
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
            return f"killed {process.pid} after {rounds(out)} rounds"
        time.sleep(0.01)
    return ""


def _victims(kill: Kill, place: Place, run: Started) -> list[psutil.Process]:
    name = VICTIMS[kill.engine][kill.victim]
    if not name:
        return [run.process]
    if kill.engine != "deployment":
        return run.called(name)
    return [process for program in place.programs.values() for process in program.called(name)]


def rounds(out: Path) -> int:
    """Complete rounds of a run."""
    with contextlib.suppress(OSError):
        return len((out / "timing.jsonl").read_text().splitlines())
    return 0


@contextlib.contextmanager
def places(engines: Sequence[str]) -> Iterator[dict[str, Place]]:
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, contextlib.ExitStack() as stack:
        found = {}
        for engine in engines:
            (Path(folder) / engine).mkdir()
            found[engine] = Place(engine, Path(folder) / engine)
            stack.enter_context(found[engine].stack)
            found[engine].open()
        yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    options = parser.parse_args()
    began, bad = time.monotonic(), 0
    with places(options.engines) as found:
        for kill in drawn(options.kills, options.engines, options.seed):
            started = time.monotonic()
            outcome = suffered(kill, found[kill.engine])
            bad += not outcome.startswith(("same bits", "refused"))
            moment = f"{kill.engine} {kill.method}: {kill.victim} in round {kill.moment + 1:.2f}"
            print(f"kill {kill.number + 1:2d}: {moment}: {outcome} ({time.monotonic() - started:.0f} s)", flush=True)
    verdict = "all ended in the bits of the undisturbed run, or said what they miss" if not bad else f"{bad} did NOT"
    print(f"{options.kills} kills, seed {options.seed}: {verdict}; {time.monotonic() - began:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
