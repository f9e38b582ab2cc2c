"""Whole runs by two trees of this repository: CPU seconds, wall seconds, peak memory and bytes sent, as ratios.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before --data-dir DATA --weights-dir WEIGHTS

Runs of both trees take turns, so that a busy machine slows both alike; each is a process of its own, on one thread,
with start, plots and all. A ratio is the median over repetitions of after / before, beside its range. The first runs of
a tree fill its cache of pictures and features: run once with ``--repeats 1`` before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import harness

CASES = {  # preset, and a method in place of its own
    **{name: (name, "") for name in ("creamfl-flickr8k-pretrained", "fedafd-flickr8k-pretrained")},
    "fedet": ("fedafd-flickr8k-pretrained", "{name: fedet, local_epochs: 1}"),
    "fedcola-flickr8k-pretrained": ("fedcola-flickr8k-pretrained", ""),
    "fedavg": ("fedcola-flickr8k", "{name: fedavg, local_steps: 20}"),
    "creamfl, averaged": ("fedcola-flickr8k", "{name: creamfl_averaged, local_steps: 20}"),
    "fedaid-medpix": ("fedaid-medpix", ""),
    "fedavg of hospitals": ("fedaid-medpix", "{name: fedavg, local_steps: 20}"),
    "moon of hospitals": ("fedaid-medpix", "{name: moon, local_steps: 20}"),
    **{name: (name, "") for name in ("scenes-demo", "fedaid-scenes")},
    "feddra-scenes": ("fedaid-scenes", "{name: feddra, robust_steps: 12, local_steps: 28}"),
}
HERE = Path(__file__).resolve().parents[1]


class Use(NamedTuple):
    """What a run took: seconds of CPU and wall time, bytes of memory at the peak and on the wire."""

    cpu: float
    wall: float
    peak: float
    sent: float


def measured(tree: Path, case: str, options: Sequence[str]) -> Use:
    """Run a case with the code of a tree.

    Raises:
        RuntimeError: the run failed; says how it ended.
    """
    preset, algorithm = CASES[case]
    method = ["--set", f"algorithm={algorithm}"] if algorithm else []
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "run", Path(folder) / "log"
        command = [sys.executable, "-m", "polyfed.cli", "run", preset, "--out", str(out), *method, *options]
        # one thread also where a tree does not set it
        environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        began = time.perf_counter()
        with log.open("wb") as file:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
            _, status, used = os.wait4(process.pid, 0)  # with what its own processes took
        wall, process.returncode = time.perf_counter() - began, os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{case} failed in '{tree}':\n{log.read_text()[-2000:]}")
        ledger = (out / "ledger.jsonl").read_text().splitlines()
        sent = sum(json.loads(line)["bytes"] for line in ledger)
        return Use(used.ru_utime + used.ru_stime, wall, used.ru_maxrss * 1024, sent)


def compare(trees: Sequence[Path], case: str, options: Sequence[str], repeats: int) -> None:
    """Run a case with both trees in turn, and report what each took and their ratios."""
    pairs = [[measured(tree, case, options) for tree in trees] for _ in range(repeats)]
    fields: dict[str, object] = {}
    for name in Use._fields:
        before, after = (statistics.median(getattr(pair[side], name) for pair in pairs) for side in (0, 1))
        # by turns: what slows the machine meanwhile slows both
        ratios = [getattr(pair[1], name) / max(getattr(pair[0], name), 1e-9) for pair in pairs]
        fields |= {f"{name}_before": before, f"{name}_after": after, f"{name}_ratio": statistics.median(ratios)}
        fields[f"{name}_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
    ratio = fields.pop("cpu_ratio")
    assert isinstance(ratio, float)
    harness.report(case, ratio=ratio, against="CPU seconds of the tree before", repeats=repeats, **fields)


def main() -> None:
    """Compare all cases, or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="root of the tree to compare with")
    parser.add_argument("--after", type=Path, default=HERE, help="root of the other tree; this one by default")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data-dir", help="folder of data sets")
    parser.add_argument("--weights-dir", help="folder of weights")
    given = parser.parse_args()
    options = ["--set", f"run.rounds={given.rounds}", "--set", "run.threads=1"]
    options += ["--data-dir", given.data_dir] if given.data_dir else []
    options += ["--weights-dir", given.weights_dir] if given.weights_dir else []
    for case in given.cases:
        compare([given.before.resolve(), given.after.resolve()], case, options, given.repeats)


if __name__ == "__main__":
    main()
