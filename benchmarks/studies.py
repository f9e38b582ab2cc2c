"""Two cells at once against one at a time, at most 0.6 of the wall time on two quiet cores; and a study that is cached.

A study of eight cells on generated scenes, about ten seconds each. Its tables are printed by the command line once more
when all cells are there: at most five seconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import yaml

SIDE_BY_SIDE, CACHED = 0.6, 5.0
STUDY = {
    "title": "eight cells",
    "base": "scenes-demo",
    "set": {"data.sources.scenes.train": 1400, "clients.paired.items": 300, "run.rounds": 2, "run.eval_every": 2},
    "seeds": 4,
    "rows": {
        "federation": {"groups": ["paired"]},
        "absolute": {"groups": ["paired"], "set": {"algorithm.distiller.weight": 3.0}},
    },
    "columns": {"R@1 sum": "r1_sum"},
}


def study(out: Path, jobs: int) -> float:
    """Wall seconds of the command."""
    command = [sys.executable, "-m", "polyfed", "study", "run", str(out.parent.parent / "study.yaml")]
    command += ["--out", str(out), "--jobs", str(jobs)]
    begun = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return time.monotonic() - begun


def main() -> None:
    """Measure and compare."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "study.yaml").write_text(yaml.safe_dump(STUDY))
        one, two = (study(folder / f"jobs{jobs}" / "s", jobs) for jobs in (1, 2))
        harness.report(
            "a study of eight cells, two at once", ratio=two / one, against="one at a time", limit=SIDE_BY_SIDE
        )
        cached = study(folder / "jobs2" / "s", 2)
        harness.report("a study that is cached", ratio=cached, unit="s", against="nothing", limit=CACHED)


if __name__ == "__main__":
    main()
