"""Kills at random moments: every run that was killed and resumed must end in the bits of an undisturbed one.

    python benchmarks/kills.py --kills 20 --seed 0

SIGKILL goes to processes of the server and of clients, on every engine: where the server was killed, the run is
resumed until it is complete; where a client's process was killed, the run must go on by itself. Metrics, ledger, models
and checkpoints are compared, byte by byte, with those of the undisturbed run on the same engine; in one of the methods
clients are at work while the server goes on. The exit code is 1 if any differ.

A victim "power" is the server whose logs lose their ends with it, as a disk that loses its power may forget unflushed
data, or keep zeros in its place. Then a run may also refuse to go on, if it names the missing part.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import harness
import psutil
import yaml
from deployment import POLYFED, Programs, loosen, start_server, start_site

from polyfed.core.errors import RunError
from polyfed.deploy.flower_programs import free_port
from polyfed.deploy.init import create_federation
from polyfed.runs.experiment import Experiment

PATIENCE = 900.0  # seconds until a run counts as hung
ROUNDS = 4
PAUSE = 5.0  # seconds before a resume; the half that was not killed may still be at work
ATTEMPTS = 10  # runs and resumes until one must be complete
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
VICTIMS = {  # part of a process's command line; empty: the run's own process
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
REFUSAL = "restore it from a copy"  # message of a run whose logs lack a part
COMPARED = ("metrics.jsonl", "ledger.jsonl", "models/**/*.safetensors", "checkpoints/*.safetensors")


def experiment(method: str, engine: str) -> dict[str, Any]:
    """Three clients of two types, 72 generated scenes, four rounds."""
    pixels = {"name": "pixels", "size": 16}
    image = {"name": "resnet", "widths": [8, 8], "depths": [1, 1], "block": "basic", "view": pixels}
    text = {"name": "bag", "width": 8, "view": {"name": "tokens", "length": 16}}
    both = {"dim": 8, "encoders": {"image": image, "text": text}}
    training = {"optimizer": {"kind": "adam", "lr": 0.01}, "batch_size": 16}
    scenes = {"name": "scenes", "train": 48, "validation": 12, "test": 12, "size": 16}
    private = {"name": "scenes", "train": 24, "validation": 8, "test": 8, "size": 16, "seed": 1}
    paired = {"training": training, "source": "scenes", "model": both, "task": "retrieval"}
    alone = {"training": training, "source": "private", "model": {"dim": 8, "encoders": {"image": image}}}
    run: dict[str, Any] = {"rounds": ROUNDS, "threads": 1, "device": "cpu", "output": {"plots": False}}
    # sites demand that no test metrics leave
    run |= {"engine": ENGINES[engine]} if ENGINES[engine] else {"evaluate_clients": False}
    run |= {"pace": PACES[method]} if method in PACES else {}
    return {
        "name": "kills",
        "data": {"sources": {"scenes": scenes, "private": private}},
        "public": {"source": "scenes", "items": 16},
        "server": paired,
        "clients": {"paired": paired | {"count": 2}, "image": alone | {"count": 1, "task": "classification"}},
        "algorithm": METHODS[method],
        "run": run,
    }


def digest(folder: Path) -> str:
    """SHA-256 over metrics, ledger, models and checkpoints."""
    files = [path for pattern in COMPARED for path in sorted(folder.glob(pattern))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@dataclass(frozen=True)
class Kill:
    """One kill: its number, engine, method and victim, and its moment in rounds since the run began."""

    number: int
    engine: str
    method: str
    victim: str
    moment: float


@dataclass
class Bench:
    """Runs on one engine, and the deployment that serves them.

    Attributes:
        engine: Name of the engine here.
        programs: Server and sites of a deployment; its folder has everything.
        known: Method -> digest and seconds per round of the undisturbed run.
    """

    engine: str
    programs: Programs
    known: dict[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def federation(self) -> Path:
        return self.programs.folder / "federation"

    @property
    def sites(self) -> Sequence[str]:
        """Names of the sites of a deployment."""
        return ("paired", "image") if self.engine == "deployment" else ()

    def config(self, method: str) -> list[str]:
        """Arguments of ``polyfed run``."""
        if self.engine != "deployment":
            path = self.programs.folder / f"{method}.yaml"
            path.write_text(yaml.safe_dump(experiment(method, self.engine)))
            return [str(path)]
        settings = [f"--set=algorithm.{key}={json.dumps(value)}" for key, value in METHODS[method].items()]
        return [str(self.federation / "server" / "experiment.yaml"), *settings]

    def open(self) -> None:
        """Bring a deployment up."""
        if not self.sites:
            return
        content, ports = Experiment.load(experiment("creamfl", self.engine)), (free_port(), free_port())
        hosts = ["localhost", "127.0.0.1"]
        create_federation(self.federation, content, hosts, port=ports[0], superlink_port=ports[1], keys=True)
        for site in self.sites:
            loosen(self.federation, site, algorithms=[])
            start_site(self.programs, self.federation, site)
        start_server(self.programs, self.federation)

    def keep_sites_up(self) -> None:
        """Restart sites that have ended, as a supervisor does at any time."""
        for site in self.sites:
            if self.programs.code(site) is not None:
                start_site(self.programs, self.federation, site)

    def keep_up(self) -> None:
        """Restart sites and server, as their operators' supervisors do, until the server is open."""
        self.keep_sites_up()
        while self.sites and self.programs.code("server") is not None:
            with contextlib.suppress(RunError):  # it ended once more
                start_server(self.programs, self.federation)

    @contextlib.contextmanager
    def started(self, *arguments: str) -> Iterator[Programs]:
        """A command of polyfed as the program ``run``; nothing of it outlasts the block."""
        with Programs(self.programs.folder) as run:
            run.start("run", [*POLYFED, *arguments])
            yield run

    def ended(self, run: Programs) -> int:
        """Exit code of a run; sites are kept up meanwhile."""

        def over() -> bool:
            self.keep_sites_up()
            return run.code("run") is not None

        run.wait("run", over, PATIENCE)
        return run.code("run") or 0

    def undisturbed(self, method: str) -> tuple[str, float]:
        """Digest of the undisturbed run, and its seconds per round."""
        if method not in self.known:
            out = self.programs.folder / f"{method}-undisturbed"
            with self.started("run", *self.config(method), "--out", str(out)) as run:
                if self.ended(run):
                    raise RunError(f"the undisturbed run failed: {run.logged('run')[-2000:]}")
            lines = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()]
            self.known[method] = digest(out), statistics.median(line["seconds"] for line in lines)  # the first is long
        return self.known[method]

    def victims(self, kill: Kill, run: Programs) -> list[psutil.Process]:
        """Processes that a kill may hit now."""
        part, programs = VICTIMS[kill.engine][kill.victim], [(run, "run")]
        if not part:
            return run.tree("run")[:1]
        if self.sites:
            programs = [(self.programs, name) for name in (*self.sites, "server")]
        live = [process for group, name in programs if group.code(name) is None for process in group.tree(name)]
        return [process for process in live if part in command_line(process)]


def command_line(process: psutil.Process) -> str:
    """Command line of a process; empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def drawn(count: int, engines: Sequence[str], seed: int) -> list[Kill]:
    """Kills in turn over engines, their victims and methods, at random moments."""
    stream, kills = random.Random(seed), []
    turns = dict.fromkeys(engines, 0)
    for number in range(count):
        engine = engines[number % len(engines)]
        names = list(VICTIMS[engine])
        methods = [name for name in METHODS if engine != "deployment" or name not in PACES]
        victim = names[turns[engine] % len(names)]
        method = methods[turns[engine] // len(names) % len(methods)]
        turns[engine] += 1
        kills.append(Kill(number, engine, method, victim, stream.uniform(0, ROUNDS)))
    return kills


def outcome(kill: Kill, bench: Bench) -> str:
    """Outcome of a kill; one that comes after the end of the run is repeated earlier."""
    while (text := _outcome(kill, bench)).startswith(MISSED) and kill.moment > 0.1:
        kill = replace(kill, moment=kill.moment / 2)
    return text


def _outcome(kill: Kill, bench: Bench) -> str:
    """Outcome of a kill, and of all resumes until the run was complete."""
    expected, seconds = bench.undisturbed(kill.method)
    out = bench.programs.folder / f"run-{kill.number}-{kill.moment:.3f}"
    with bench.started("run", *bench.config(kill.method), "--out", str(out)) as run:
        hit = strike(kill, bench, run, seconds, out)
        codes = [bench.ended(run)]
    missing = lose_tails(out, random.Random(kill.number)) if hit and kill.victim == "power" else ""
    log = ""
    while codes[-1] and len(codes) < ATTEMPTS and not (missing and REFUSAL in log):
        time.sleep(PAUSE)
        bench.keep_up()
        again = ["resume", str(out)] if (out / "run.json").is_file() else None
        with bench.started(*(again or ["run", *bench.config(kill.method), "--out", str(out)])) as run:
            codes.append(bench.ended(run))
        log = run.logged("run")
    bench.keep_up()
    same = not codes[-1] and digest(out) == expected
    resumed = kill.victim in ENDS_THE_RUN or len(codes) == 1  # a client's death must not end a run
    verdict = "same bits" if same and resumed and hit else MISSED if not hit else "DIFFERENT"
    if missing and codes[-1]:
        verdict = "refused" if REFUSAL in log else "DIFFERENT"
    return f"{verdict}: {hit}{missing}; exit codes {codes}"


def lose_tails(out: Path, stream: random.Random) -> str:
    """Cut the ends off the logs of a run that was killed, or put zeros in their place; describes the damage."""
    done = []
    for log in sorted(out.glob("*.jsonl")):
        size = log.stat().st_size
        left = max(size - stream.randrange(LOST), 0)
        zeros = stream.random() < 0.5
        os.truncate(log, left)
        os.truncate(log, size if zeros else left)
        done.append(f"{log.stem} {left} of {size} bytes{' and zeros' if zeros else ''}")
    return f", left {', '.join(done)}"


def strike(kill: Kill, bench: Bench, run: Programs, seconds: float, out: Path) -> str:
    """Kill a process of the victim's role at the moment, or as soon as there is one after it."""
    complete, part = divmod(kill.moment, 1.0)
    moment = float("inf")
    while run.code("run") is None:
        if moment == float("inf") and (out / "run.json").is_file() and rounds(out) >= complete:
            moment = time.monotonic() + part * seconds
        with contextlib.suppress(psutil.Error):
            if time.monotonic() >= moment and (processes := bench.victims(kill, run)):
                process = random.Random(kill.number).choice(processes)
                process.send_signal(signal.SIGKILL)
                return f"killed {process.pid} after {rounds(out)} rounds"
        time.sleep(0.01)
    return ""


def rounds(out: Path) -> int:
    """Complete rounds of a run."""
    with contextlib.suppress(OSError):
        return len((out / "timing.jsonl").read_text().splitlines())
    return 0


def main() -> int:
    """Kill and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    given = parser.parse_args()
    bad, benches = 0, dict[str, Bench]()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, contextlib.ExitStack() as stack:
        for engine in given.engines:
            (Path(folder) / engine).mkdir()
            benches[engine] = Bench(engine, stack.enter_context(Programs(Path(folder) / engine)))
            benches[engine].open()
        for kill in drawn(given.kills, given.engines, given.seed):
            started = time.monotonic()
            text = outcome(kill, benches[kill.engine])
            bad += not text.startswith(("same bits", "refused"))
            moment = f"{kill.engine} {kill.method}: {kill.victim} in round {kill.moment + 1:.2f}"
            print(f"kill {kill.number + 1:2d}: {moment}: {text} ({time.monotonic() - started:.0f} s)", flush=True)
    name = f"{given.kills} kills, seed {given.seed}: runs that neither end in the same bits nor name the missing part"
    harness.report(name, ratio=bad, unit="runs", against="undisturbed runs", limit=0)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
