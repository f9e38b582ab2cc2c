"""The table of docs/results.md on a malicious client: every method that exchanges representations or prototypes.

    python benchmarks/attackers/malicious.py --data-dir DATA --weights-dir WEIGHTS --out runs/malicious [--jobs 2]

One paired client of the ten sends, in every round, random vectors, its own with the sign turned, one vector for all
samples, a thousand times too much, what another client sent, or NaN. Methods have the settings of their rows of the
study ``exchange``, at the preset's rate. Runs that are complete are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from polyfed.lab.studies.study import Study
from polyfed.runs.records import RunRecords
from runs import Planned

METHODS = ("fedafd", "creamfl", "fedmd", "margin", "fedgems", "fedet", "fedmkd", "fedproto", "fedtgp")
ATTACKS = ("none", "random", "flipped", "constant", "scaled", "copied", "nan")
ATTACKER = "paired-0"
SERVERLESS = ("fedproto", "fedtgp")
PROTOTYPES_BY = "image-0"  # paired clients have no prototypes


@dataclass(frozen=True)
class Cell:
    """What one run shows."""

    server: float
    others: float
    excluded: int


def planned(method: str, attack: str, options: argparse.Namespace) -> Planned:
    """A run with or without the attacker."""
    study = Study.load("exchange")
    settings = study.resolved(method).set.get("algorithm")
    every = [f"algorithm={json.dumps(settings)}"] if settings else []
    every += [f"run.rounds={options.rounds}", f"run.eval_every={options.rounds}", *options.set]
    who = PROTOTYPES_BY if method in SERVERLESS else ATTACKER
    engine = [] if attack == "none" else [f"run.engine={{name: attacks.Attacked, client: {who}, attack: {attack}}}"]
    return Planned(f"{method}-{attack}", study.base, options.seed, [*every, *engine, "run.plots=false"])


def cell(folder: Path, method: str) -> Cell:
    """The server's recall, the other clients' mean metric, and how often the attacker was excluded."""
    records = RunRecords.load(folder)
    who = PROTOTYPES_BY if method in SERVERLESS else ATTACKER
    group = who.partition("-")[0]
    metric = "accuracy" if group == "image" else "r1_sum"
    others = [records.last(client).get(metric) for client in records.groups[group] if client != who]
    excluded = sum(event.event == "client_excluded" and event.participant == who for event in records.events)
    return Cell(records.last("server").get("r1_sum", float("nan")), mean(v for v in others if v is not None), excluded)


def shown(cells: Mapping[str, Cell], method: str) -> str:
    """A row of the table."""
    parts = []
    for attack in ATTACKS:
        found = cells[attack]
        value = f"{found.others:.2f}" if method in SERVERLESS else f"{found.server:.2f} / {found.others:.2f}"
        parts.append(value + (f" (excluded {found.excluded} x)" if found.excluded else ""))
    return "| " + " | ".join([method, *parts]) + " |"


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--data-dir", "--weights-dir", "--out"):
        parser.add_argument(option, type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # for the engine
    runs = {(method, attack): planned(method, attack, options) for method in options.methods for attack in ATTACKS}
    with ThreadPoolExecutor(options.jobs) as pool:
        where = (options.out, options.data_dir, options.weights_dir)
        for future in [pool.submit(run.execute, *where) for run in runs.values()]:
            future.result()
    print("server's R@1 sum / mean of the honest clients of the attacker's group (prototypes: accuracy)\n")
    print("| method | " + " | ".join(ATTACKS) + " |\n|" + "---|" * (len(ATTACKS) + 1))
    for method in options.methods:
        cells = {attack: cell(options.out / runs[method, attack].name, method) for attack in ATTACKS}
        print(shown(cells, method))


if __name__ == "__main__":
    main()
