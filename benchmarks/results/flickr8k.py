"""The table of docs/results.md: CreamFL and its twins on Flickr8k, CIFAR-100 and AG_NEWS, several seeds each.

    python benchmarks/results/flickr8k.py --data-dir DATA --weights-dir WEIGHTS --out runs/flickr8k [--jobs 2]

Runs that are complete are not run again, those that were interrupted are resumed; then the tables are printed.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median

from polyfed.runs.records import RunRecords
from runs import Planned, arguments, spread

TWINS = ("creamfl", "reamfl-mean", "server-only", "local")
RECALLS = [f"{a}_to_{b}_r@{k}" for a, b in (("image", "text"), ("text", "image")) for k in (1, 5, 10)]


def planned(scratch: int, pretrained: int, local: int, overrides: list[str]) -> list[Planned]:
    """All runs, seed by seed."""
    seeds = {"": scratch, "-pretrained": pretrained}
    every = [
        Planned(f"{twin}-flickr8k{form}-{seed}", f"{twin}-flickr8k{form}", seed, overrides)
        for form, count in seeds.items()
        for twin in TWINS
        for seed in range(min(count, local) if twin == "local" else count)
    ]
    return sorted(every, key=lambda run: run.seed)


def table(out: Path, form: str, seeds: int) -> list[str]:
    """Markdown rows of one form: server recalls of the round that validation selects, clients, MiB, seconds."""
    head = ["method", *[name.replace("image", "i").replace("text", "t") for name in RECALLS], "R@1 sum"]
    rows = ["| " + " | ".join([*head, "image clients", "text clients", "paired R@1 sum", "MiB", "s"]) + " |"]
    rows.append("|" + "---|" * (len(head) + 5))
    for twin in TWINS:
        folders = [out / f"{twin}-flickr8k{form}-{seed}" for seed in range(seeds)]
        runs = [RunRecords.load(folder) for folder in folders if (folder / "report.md").exists()]
        rows.append(
            "| " + " | ".join([f"{twin} ({len(runs)})", *server_cells(runs), *client_cells(runs), *costs(runs)]) + " |"
        )
    untrained = [RunRecords.load(out / f"creamfl-flickr8k{form}-{seed}") for seed in range(seeds)]
    cells = [spread(run.series("server", name)[0] for run in untrained) for name in [*RECALLS, "r1_sum"]]
    return [*rows, "| " + " | ".join(["untrained", *cells, *["-"] * 5]) + " |"]


def server_cells(runs: list[RunRecords]) -> list[str]:
    """Test recalls at the round that is best on validation."""
    chosen = [(run.best("server", "r1_sum", "validation") or (0, 0.0))[0] for run in runs]
    return [
        spread(run.series("server", name)[at] for run, at in zip(runs, chosen, strict=True))
        for name in [*RECALLS, "r1_sum"]
    ]


def client_cells(runs: list[RunRecords]) -> list[str]:
    """Mean over a group's clients, each after its own last evaluation."""
    cells = []
    for group, metric in (("image", "accuracy"), ("text", "accuracy"), ("paired", "r1_sum")):
        found = [[run.last(client).get(metric) for client in run.groups.get(group, ())] for run in runs]
        means = [mean(known) for values in found if (known := [value for value in values if value is not None])]
        cells.append(spread(means) if means else "-")
    return cells


def costs(runs: list[RunRecords]) -> list[str]:
    """MiB that crossed the wire in the whole run (mean), and its seconds (median)."""
    return [
        f"{mean(run.total_bytes() for run in runs) / 2**20:.1f}",
        f"{median(sum(run.seconds.values()) for run in runs):.0f}",
    ]


def knowledge(out: Path, form: str, seeds: int) -> list[str]:
    """Distance between server representations and targets before and after distillation, first and last round."""
    rows = [
        "| method | modality | round 1 before -> after | last round before -> after |",
        "|---|---|---|---|",
    ]
    for twin in ("creamfl", "reamfl-mean"):
        for modality in ("image", "text"):
            cells = []
            for position in (0, -1):
                ends = []
                for when in ("before", "after"):
                    name = f"kd_distance_{when}.{modality}"
                    series = [
                        list(
                            RunRecords.load(out / f"{twin}-flickr8k{form}-{seed}")
                            .series("server", name, "train")
                            .values()
                        )
                        for seed in range(seeds)
                    ]
                    ends.append(mean(values[position] for values in series))
                cells.append(f"{ends[0]:.3f} -> {ends[1]:.3f}")
            rows.append("| " + " | ".join([twin, modality, *cells]) + " |")
    return rows


def main() -> None:
    """Run what is missing and print the tables."""
    parser = arguments(__doc__)
    parser.add_argument("--scratch-seeds", type=int, default=3)
    parser.add_argument("--pretrained-seeds", type=int, default=5)
    parser.add_argument("--local-seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    forms = (("", options.scratch_seeds), ("-pretrained", options.pretrained_seeds))
    with ThreadPoolExecutor(options.jobs) as pool:
        plan = planned(options.scratch_seeds, options.pretrained_seeds, options.local_seeds, options.set)
        where = (options.out, options.data_dir, options.weights_dir)
        for future in [pool.submit(run.execute, *where) for run in plan]:
            future.result()
    for form, seeds in forms:
        lines = [*table(options.out, form, seeds), "", *knowledge(options.out, form, seeds)]
        print(json.dumps({"name": f"flickr8k{form}", "seeds": seeds}), *lines, "", sep="\n")


if __name__ == "__main__":
    main()
