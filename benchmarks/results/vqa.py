"""The tables of docs/vqa.md: VQA on easy-VQA and DAQUAR by questions alone, by public data alone, and by CreamFL.

    python benchmarks/results/vqa.py --data-dir DATA --weights-dir WEIGHTS --out runs/vqa [--sets easy] [--jobs 1]

One thread a run. Runs that are complete are not run again, those that were interrupted are resumed; then the tables
are printed: test accuracy in percent of the round that is best on validation, mean and standard deviation over seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean, median

from polyfed.runs.records import RunRecords
from runs import Planned, arguments, spread

BLIND = ("server.task.use=[text]",)
SETS = ("easy", "daquar")


@dataclass(frozen=True)
class Row:
    """A row of a table: what is appended to the preset's name, and overrides."""

    suffix: str
    overrides: Sequence[str] = ()


ROWS: Mapping[str, Row] = {
    "question only": Row("-server-only", BLIND),
    "public data alone": Row("-server-only"),
    "creamfl": Row(""),
}


def planned(data: str, row: str, seed: int, overrides: Sequence[str]) -> Planned:
    """One run."""
    name = f"{data}-{row.replace(' ', '-')}-{seed}"
    return Planned(name, f"vqa-{data}{ROWS[row].suffix}", seed, [*ROWS[row].overrides, *overrides])


def finished(data: str, row: str, options: argparse.Namespace) -> list[RunRecords]:
    """The complete runs of a row."""
    folders = [options.out / planned(data, row, seed, ()).name for seed in range(options.seeds)]
    return [RunRecords.load(folder) for folder in folders if (folder / "report.md").exists()]


def chosen(run: RunRecords, metric: str) -> float:
    """A test metric at the round of the best validation accuracy."""
    found = run.best("server", "accuracy", "validation")
    return run.series("server", metric)[found[0] if found else 0]


def table(data: str, options: argparse.Namespace) -> list[str]:
    """Markdown rows: accuracy of all questions and of each kind, MiB that crossed, seconds, best round."""
    runs = {row: found for row in ROWS if (found := finished(data, row, options))}
    if not runs:
        return [f"vqa-{data}: no run is complete"]
    first = next(iter(runs.values()))[0]
    kinds = [name.removeprefix("n_") for name in first.last("server") if name.startswith("n_")]
    metrics = ["accuracy", *(f"accuracy_{kind}" for kind in kinds)]
    sizes = [f"{kind} ({chosen(first, f'n_{kind}'):.0f})" for kind in kinds]
    heads = ["method (seeds)", f"all ({chosen(first, 'n'):.0f})", *sizes, "best round", "MiB", "s"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    prior = [f"{chosen(first, name.replace('accuracy', 'prior')):.2f}" for name in metrics]
    lines.append("| " + " | ".join(["prior", *prior, "-", "-", "-"]) + " |")
    for row, found in runs.items():
        cells = [spread(chosen(run, metric) for run in found) for metric in metrics]
        lines.append("| " + " | ".join([f"{row} ({len(found)})", *cells, *costs(found)]) + " |")
    return [*lines, f"answerable {chosen(first, 'answerable'):.2f} %, {chosen(first, 'answers'):.0f} answers"]


def costs(runs: Sequence[RunRecords]) -> list[str]:
    """Best round by validation (mean), MiB of a whole run (mean) and its seconds (median)."""
    best = [(run.best("server", "accuracy", "validation") or (0, 0.0))[0] for run in runs]
    size = mean(run.total_bytes() for run in runs) / 2**20
    return [f"{mean(best):.0f}", f"{size:.1f}", f"{median(sum(run.seconds.values()) for run in runs):.0f}"]


def main() -> None:
    """Run what is missing and print the tables."""
    parser = arguments(__doc__, jobs=1, seeds=3)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    every = [(seed, data, row) for seed in range(options.seeds) for data in options.sets for row in options.rows]
    where = (options.out, options.data_dir, options.weights_dir)
    with ThreadPoolExecutor(options.jobs) as pool:
        for future in [pool.submit(planned(data, row, seed, options.set).execute, *where) for seed, data, row in every]:
            future.result()
    for data in options.sets:
        print(f"\nvqa-{data}\n", *table(data, options), sep="\n")


if __name__ == "__main__":
    main()
