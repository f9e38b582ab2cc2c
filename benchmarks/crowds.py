"""Peak memory of federations of many clients against one of ten: what each client adds to what may be in memory.

Two rounds of SCAFFOLD, in which every client sends its weights and a control variate and keeps the latter; in memory
may be 16 MiB of kept states and 16 MiB of waiting replies, all others are in files. Each federation runs in a process
of its own, over the same data, of which each client has ten samples. Limit: 100 KiB a client, for its samples, its
lines in the ledger and the norm of its update, whatever the size of its model.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from typing import Any

import federations
import harness
import torch

LIMIT = 100.0
"""KiB."""
SIZES = {"10k": (12, 16), "500k": (620, 32)}
"""Weights -> width of the hidden layer, and d; pictures have 768 values, and there are 10 classes."""
FEW, MOST, SAMPLES = 10, 1000, 10
IN_MEMORY = 16 << 20


def federation(clients: int, size: str, *, clip: bool = False) -> dict[str, Any]:
    """SCAFFOLD with all clients in every round, and no evaluation."""
    hidden, dim = SIZES[size]
    client = {
        "count": clients,
        "items": clients * SAMPLES,
        "source": "noise",
        "model": federations.image_model(dim, hidden),
        "task": "classification",
        "training": {"optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9}, "batch_size": SAMPLES},
    }
    run = {"rounds": 1000, "eval_every": 1000, "seed": 0, "threads": torch.get_num_threads(), "device": "cpu"}
    return {
        "data": {"sources": {"noise": federations.Noise(count=MOST * SAMPLES)}},
        "clients": {"client": client},
        "algorithm": {"name": "scaffold", "local_epochs": 1},
        "aggregation": {"clip": {} if clip else None},
        "run": run | {"state_memory": IN_MEMORY},
    }


def one(clients: int, size: str, *, clip: bool) -> None:
    """Two rounds, and print the number of weights and the peak of this process in bytes."""
    torch.set_num_threads(1)
    with federations.prepared(federation(clients, size, clip=clip)) as session:
        loop = session.loop()
        loop.experiment.algorithm.setup(loop.server)
        for number in (1, 2):
            loop.round(number)
        weights = sum(value.numel() for value in federations.global_weights(session).values())
    print(json.dumps([weights, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))


def main() -> None:
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--clients", nargs="+", type=int, default=[100, MOST], help=f"at most {MOST}")
    parser.add_argument("--clip", action="store_true", help="with norm clipping")
    parser.add_argument("--one", nargs=2, metavar=("CLIENTS", "SIZE"), help="a single federation")
    options = parser.parse_args()
    if options.one:
        clients, size = options.one
        one(int(clients), size, clip=options.clip)
        return
    for size in options.sizes:
        peaks = {}
        for clients in (FEW, *options.clients):
            command = [sys.executable, __file__, "--one", str(clients), size]
            command += ["--clip"] if options.clip else []
            told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            weights, peaks[clients] = json.loads(told.splitlines()[-1])
        for clients in options.clients:
            more = (peaks[clients] - peaks[FEW] - 2 * IN_MEMORY) / (clients - FEW) / 1024
            harness.report(
                f"{clients:,} clients of SCAFFOLD{' clipped' * options.clip}, {size} weights: memory a client",
                ratio=max(more, 0.0),
                unit="KiB",
                against=f"{FEW} clients",
                limit=LIMIT,
                ratio_of_peaks=peaks[clients] / peaks[FEW],
                peak_mib=peaks[clients] / 2**20,
                rival_mib=peaks[FEW] / 2**20,
                states_mib=clients * weights * 4 / 2**20,
            )


if __name__ == "__main__":
    main()
