"""CPU seconds of a cell of each paper's first table, with the code as it is against an earlier commit.

    POLYFED_DATA=data POLYFED_WEIGHTS=weights python benchmarks/cells.py --against 743f8b2f --rounds 2

The earlier commit says what a cell is, and both run it, one after the other, each in a process of its own on one
thread. Run it twice: only then all is there that a cache keeps. Neither imports nor columns count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

import harness

CELLS = {
    "creamfl": ("papers/creamfl-t1", "creamfl"),
    "fedcola": ("papers/fedcola-t2", "ca+cp+cl"),
    "fedafd": ("papers/fedafd-t1", "fedafd"),
    "fedaid": ("papers/fedaid-t1", "fedaid"),
    "scarce": ("leaderboard-scarce", "creamfl"),
}
_RESOLVE = """
import sys
from pathlib import Path
from polyfed.lab.studies.cells import Places, resolve
from polyfed.lab.studies.study import Study
name, row, rounds, out = sys.argv[1:]
study = Study.load(name)
cell = resolve(study, row, study.points_of(row)[0], Places(), {"run.rounds": int(rounds)})
Path(out).write_text(cell.to_yaml())
"""
_RUN = """
import json, sys, time
from pathlib import Path
import polyfed.lab.studies.execution
from polyfed import Experiment, run
experiment, begun = Experiment.load(sys.argv[1]), time.process_time()
run(experiment, Path(sys.argv[2]), quiet=True)
seconds = time.process_time() - begun
last = [json.loads(line) for line in (Path(sys.argv[2]) / "metrics.jsonl").read_text().splitlines()][-1]
print(json.dumps({"seconds": seconds, "metrics": last["metrics"]}))
"""


def source_of(commit: str, folder: Path) -> Path:
    """The package as it was."""
    packed = subprocess.run(["git", "archive", commit, "src"], check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def output_of(code: str, source: Path, *arguments: object) -> str:
    """What a program prints with the package in ``source``."""
    env = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout


def compare(name: str, rounds: int, commit: str, before: Path, folder: Path) -> None:
    """Run a cell with both."""
    config = folder / f"{name}.yaml"
    output_of(_RESOLVE, before, *CELLS[name], rounds, config)
    now = Path(__file__).parents[1] / "src"
    old, new = (
        json.loads(output_of(_RUN, source, config, folder / f"{name}-{label}").splitlines()[-1])
        for label, source in (("before", before), ("now", now))
    )
    ratio, same = new["seconds"] / old["seconds"], new["metrics"] == old["metrics"]
    fields = {"before_s": old["seconds"], "now_s": new["seconds"], "same_metrics": same}
    harness.report(f"cells/{name}, {rounds} rounds", ratio=ratio, against=commit, **fields)


def main() -> None:
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="743f8b2f", help="the earlier commit")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=CELLS, default=list(CELLS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        before = source_of(given.against, Path(name))
        for cell in given.only:
            compare(cell, given.rounds, given.against, before, Path(name))


if __name__ == "__main__":
    main()
