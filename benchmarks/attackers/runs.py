"""Running many presets side by side, one process and one thread each, and summarising seeds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev


@dataclass(frozen=True)
class Planned:
    """One run: its folder's name, preset, seed and overrides."""

    name: str
    preset: str
    seed: int
    overrides: Sequence[str] = ()

    def execute(self, out: Path, data_dir: Path, weights_dir: Path) -> None:
        """Run, or resume; nothing if it is complete."""
        folder = out / self.name
        if (folder / "report.md").exists() and not (folder / "checkpoints").exists():
            return
        command = [sys.executable, "-m", "polyfed.cli"]
        if (folder / "run.json").exists():  # of a complete run this changes nothing
            command += ["resume", str(folder)]
        else:
            command += ["run", self.preset, "--seed", str(self.seed), "--out", str(folder), "--set", "run.threads=1"]
            command += ["--data-dir", str(data_dir), "--weights-dir", str(weights_dir)]
            command += [part for value in self.overrides for part in ("--set", value)]
        out.mkdir(parents=True, exist_ok=True)
        with (out / f"{self.name}.log").open("a") as log:
            subprocess.run(command, stdout=log, stderr=log, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        shutil.rmtree(folder / "checkpoints")  # half a gigabyte a run, and nothing of a table


def spread(values: Iterable[float]) -> str:
    """Mean and standard deviation over seeds."""
    found = list(values)
    return f"{mean(found):.2f} ± {stdev(found):.2f}" if len(found) > 1 else f"{found[0]:.2f}"
