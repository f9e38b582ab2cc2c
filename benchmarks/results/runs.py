"""Running many presets side by side, one process and one thread each, and summarising seeds."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from polyfed.runs.records import RunRecords


def arguments(
    description: str | None, *, jobs: int = 2, seeds: int | None = None, has_data: bool = True
) -> argparse.ArgumentParser:
    """What every script here takes: where data and weights are (unless data are generated), where runs go, how many at
    once and with how many seeds (None: it has seeds in another way)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--data-dir", "--weights-dir", "--out") if has_data else ("--out",):
        parser.add_argument(option, type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=jobs)
    if seeds is not None:
        parser.add_argument("--seeds", type=int, default=seeds)
    return parser


@dataclass(frozen=True)
class Planned:
    """One run: its folder's name, preset, seed and overrides."""

    name: str
    preset: str
    seed: int
    overrides: Sequence[str] = ()

    def execute(
        self,
        out: Path,
        data_dir: Path | None = None,
        weights_dir: Path | None = None,
        after: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """Run, or resume; nothing if it is complete. ``after`` gets the folder while clients' models are there."""
        folder = out / self.name
        if (folder / "report.md").exists() and not (folder / "checkpoints").exists():
            return
        command = [sys.executable, "-m", "polyfed.cli"]
        if (folder / "run.json").exists():  # of a complete run this changes nothing
            command += ["resume", str(folder)]
        else:
            command += ["run", self.preset, "--seed", str(self.seed), "--out", str(folder), "--set", "run.threads=1"]
            places = {"--data-dir": data_dir, "--weights-dir": weights_dir}
            command += [part for option, place in places.items() if place for part in (option, str(place))]
            command += [part for value in self.overrides for part in ("--set", value)]
        out.mkdir(parents=True, exist_ok=True)
        with (out / f"{self.name}.log").open("a") as log:
            subprocess.run(command, stdout=log, stderr=log, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        after(folder)
        shutil.rmtree(folder / "checkpoints")  # half a gigabyte a run, and nothing of a table


def client_values(run: RunRecords, group: str, metric: str) -> list[float]:
    """The last value of every client of a group that was tested."""
    found = [run.last(client).get(metric) for client in run.groups.get(group, ())]
    return [value for value in found if value is not None]


def spread(values: Iterable[float]) -> str:
    """Mean and standard deviation over seeds."""
    found = list(values)
    return f"{mean(found):.2f} ± {stdev(found):.2f}" if len(found) > 1 else f"{found[0]:.2f}"
