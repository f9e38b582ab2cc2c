"""How much longer a process with one or two threads takes on a machine whose cores others use too.

Threads of a parallel region wait for one another. If they wait actively, as OpenMP does by default, a core that another
process should have is spent on waiting for a thread which that process keeps from running. Each case is a process of
its own, as the setting is read when torch is imported: a stack of small layers in forward and backward, alone and
beside as many busy processes as there are cores. The ratio is that of the wall times; with cores shared fairly it is 2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import harness

_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
CASES = {
    "default": {},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "GOMP_SPINCOUNT=0": {"GOMP_SPINCOUNT": "0"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
}
_WORK = """
import sys, time, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(int(sys.argv[1]))
layer = lambda: nn.Sequential(nn.LayerNorm(192), nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192))
model, x = nn.Sequential(*(layer() for _ in range(6))), torch.randn(8, 65, 192)
model(x).sum().backward()
begun, steps = time.monotonic(), 0
while (passed := time.monotonic() - begun) < float(sys.argv[2]):
    model(x).sum().backward()
    steps += 1
print(passed / steps)
"""


def seconds(threads: int, settings: Mapping[str, str], length: float) -> float:
    """Mean wall seconds of a step, over so many seconds."""
    clean = {name: value for name, value in os.environ.items() if name not in (*_SETTINGS, "OMP_NUM_THREADS")}
    command = [sys.executable, "-c", _WORK, str(threads), str(length)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**clean, **settings})
    return float(done.stdout)


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Within the block, as many busy processes as there are cores."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one second a measurement in place of five")
    length = 1.0 if parser.parse_args().quick else 5.0
    for name, settings in CASES.items():
        for threads in (1, 2):
            alone = seconds(threads, settings, length)
            with busy_cores():
                loaded = seconds(threads, settings, length)
            fields = {"alone_ms": 1e3 * alone, "loaded_ms": 1e3 * loaded}
            harness.report(f"threads/{threads}, {name}", ratio=loaded / alone, against="alone", **fields)


if __name__ == "__main__":
    main()
