"""CreamFL on real data on every engine: seconds, and whether all write the same bytes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import yaml
from deployment import POLYFED, Programs, bring_up

from polyfed.runs.experiment import Experiment

PRESET = "creamfl-flickr8k"
_ENGINES: dict[str, dict[str, Any]] = {
    "local": {"name": "local"},
    "ray": {"name": "ray", "workers": 2},
    "flower": {"name": "flower", "nodes": 2},
}
_COMPARED = {  # what a run ends with: pattern of its files
    "metrics": "metrics.jsonl",
    "ledger": "ledger.jsonl",
    "weights": "models/last/*.safetensors",
}


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        seconds: of the command, its start included.
        rounds: seconds of each round.
        digests: what is compared -> SHA-256 of its files.
    """

    seconds: float
    rounds: list[float]
    digests: Mapping[str, str]


def bench(programs: Programs, data: Path, engines: Sequence[str], overrides: Sequence[str]) -> None:
    """The preset, two rounds unless overridden; a line for each engine, compared with the first."""
    given = ["run.rounds=2", "run.threads=1", "run.device=cpu", "run.output.plots=false", *overrides]
    experiment = Experiment.load(PRESET, [f"data.dir={json.dumps(str(data))}", *given])
    source = programs.folder / "creamfl.yaml"
    source.write_text(experiment.to_yaml())
    first: tuple[str, Result] | None = None
    for engine in engines:
        found = _deployed(programs, source, experiment) if engine == "deployment" else _here(programs, source, engine)
        first = first or (engine, found)
        _report(engine, found, *first, experiment)


def _here(programs: Programs, source: Path, engine: str) -> Result:
    return _run(programs, engine, source, [f"run.engine={json.dumps(_ENGINES[engine])}"])


def _deployed(programs: Programs, source: Path, experiment: Experiment) -> Result:
    prepare = partial(_settle, data=str(experiment.data.data_folder), cache=str(experiment.data.cache_folder))
    loopback = bring_up(programs, yaml.safe_load(source.read_text()), prepare)
    print(f"# server, gate and sites {', '.join(loopback.sites)} connected after {loopback.seconds:.1f} s", flush=True)
    return _run(programs, "deployment", loopback.experiment, [])


def _settle(site: Path, *, data: str, cache: str) -> None:
    """What a site's operator does: say where the data are."""
    path = site / "site.yaml"
    content = yaml.safe_load(path.read_text())
    content["data"] |= {"dir": data, "cache_dir": cache}
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def _run(programs: Programs, engine: str, source: Path, overrides: Sequence[str]) -> Result:
    out = programs.folder / f"{engine}-run"
    command = [*POLYFED, "run", str(source), "--out", str(out), *(f"--set={text}" for text in overrides)]
    began = time.monotonic()
    programs.run(f"creamfl-{engine}", command, seconds=6 * 3600)
    seconds = time.monotonic() - began
    rounds = [json.loads(line)["seconds"] for line in (out / "timing.jsonl").read_text().splitlines()]
    return Result(seconds, rounds, {what: _digest(out, pattern) for what, pattern in _COMPARED.items()})


def _digest(folder: Path, pattern: str) -> str:
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"the run left no {pattern} in {folder}")
    return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest()


def _report(engine: str, found: Result, rival: str, other: Result, experiment: Experiment) -> None:
    equal = {f"identical_{what}": digest == other.digests[what] for what, digest in found.digests.items()}
    harness.report(
        f"a run of CreamFL, engine {engine}",
        ratio=found.seconds / other.seconds,
        against=f"the {rival} engine, wall time",
        seconds=found.seconds,
        rival_seconds=other.seconds,
        round_seconds=[round(value, 2) for value in found.rounds],
        **equal,
        weights_sha256=found.digests["weights"][:16],
        clients=sum(group.count for group in experiment.clients.values()),
        rounds=experiment.run.rounds,
        threads=experiment.run.threads,
    )
