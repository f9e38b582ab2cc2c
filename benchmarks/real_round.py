"""Peak memory of two rounds of CreamFL on real data: preset creamfl-flickr8k-pretrained, in a process of its own.

It needs data sets and weights, in POLYFED_DATA and POLYFED_WEIGHTS. A first run fills the caches of pictures and
features, and does not count. Limit: 1,300 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

PRESET, LIMIT = "creamfl-flickr8k-pretrained", 1300.0
NEEDED = ("POLYFED_DATA", "POLYFED_WEIGHTS")


def one() -> None:
    """Two rounds; print CPU seconds, imports left out, and the peak of this process in bytes."""
    from polyfed import Experiment, run

    settings = ["run.rounds=2", "run.eval_every=2", "run.threads=1", "run.device=cpu", "run.output.plots=false"]
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run(Experiment.load(PRESET, settings), Path(folder) / "run", quiet=True)
    print(json.dumps([time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", action="store_true", help="one run")
    if parser.parse_args().one:
        one()
        return
    if missing := [name for name in NEEDED if name not in os.environ]:
        harness.lacking(f"{' and '.join(missing)}: folders of data sets and of weights")
        return
    command = [sys.executable, __file__, "--one"]
    told = [subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout for _ in "ab"]
    seconds, peak = json.loads(told[1].splitlines()[-1])
    name = f"two rounds of {PRESET}: peak memory"
    harness.report(name, ratio=peak / 2**20, unit="MiB", against="nothing", limit=LIMIT, cpu_seconds=seconds)


if __name__ == "__main__":
    main()
