"""The table of docs/results.md on weight exchange: FedCola and its baselines on Flickr8k, CIFAR-100 and AG_NEWS.

    python benchmarks/results/transfer.py --data-dir DATA --weights-dir WEIGHTS --out runs/transfer [--jobs 2]

First the learning rate of each method is chosen from one grid, on a seed of its own and a part of the rounds, by the
validation recall of the paired clients' global model; then every method runs with every seed. Runs that are complete
are not run again, those that were interrupted are resumed; then the tables are printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean, median

from polyfed.runs.records import RunRecords
from runs import Planned, arguments, client_values, spread

GRID = (0.0005, 0.001, 0.002)
SEARCH_SEED = 100
GROUPS = ("image", "text", "paired")
ALL_TESTED = ("run.evaluate_clients=true", "clients.paired.test_split=test", "clients.paired.task.folds=[5, 1]")
POOLED = tuple(f"clients.{group}.count=1" for group in GROUPS)


@dataclass(frozen=True)
class Method:
    """A row: overrides of the preset, and the row whose learning rate it shares."""

    overrides: tuple[str, ...]
    rate_of: str = ""


METHODS: Mapping[str, Method] = {
    "fedavg": Method(("algorithm.name=fedavg",)),
    "fedprox": Method(("algorithm.name=fedprox",)),
    "fediot": Method(("algorithm.name=fediot",)),
    "moon": Method(("algorithm.name=moon",)),
    "fedema": Method(("algorithm.name=fedema", "algorithm.predictor_width=96")),
    "scaffold": Method(("algorithm.name=scaffold",)),
    "creamfl": Method(("algorithm.name=creamfl_averaged",)),
    "fedcola": Method(()),
    "ca": Method(("algorithm.complement=none", "algorithm.averaging={name: fedcola, compensation: false}")),
    "ca+comp": Method(("algorithm.complement=none",), "fedcola"),
    "local": Method(("algorithm.name=local", *ALL_TESTED)),
    "centralised": Method(("algorithm.name=centralised", "run.sampling.cohort=null", *POOLED)),
}
STEPS = {"centralised": 40}  # two of the paired clients' 20 a round, now of one


def planned(name: str, seed: int, rate: float, rounds: int, options: argparse.Namespace) -> Planned:
    """A run of a method."""
    rates = [f"clients.{group}.training.optimizer.lr={rate}" for group in GROUPS]
    method = METHODS[name].overrides
    steps = [f"algorithm.local_steps={STEPS.get(name, 20)}"]
    every = [f"run.rounds={rounds}", f"run.eval_every={rounds}"]
    overrides = [*method, *(option for option in steps), *rates, *every, *options.set]
    return Planned(f"{name}-lr{rate:g}-t{rounds}-{seed}", options.preset, seed, overrides)


def score(records: RunRecords) -> float:
    """What a learning rate is chosen by: the server's validation recall, or the clients' own where it has none."""
    series = records.series("server", "r1_sum", "validation")
    own = [records.last(client).get("r1_sum") for client in records.groups.get("paired", ())]
    known = [value for value in own if value is not None]
    return mean(known) if known else series[max(series)]


def chosen_rates(options: argparse.Namespace, pool: ThreadPoolExecutor) -> dict[str, float]:
    """Method -> learning rate, of the grid."""
    searched = [name for name in options.methods if not METHODS[name].rate_of]
    runs = {
        (name, rate): planned(name, SEARCH_SEED, rate, options.search_rounds, options)
        for rate in GRID
        for name in searched
    }
    execute(runs.values(), options, pool)
    found = {}
    print("| method | " + " | ".join(f"lr {rate:g}" for rate in GRID) + " | chosen |\n|" + "---|" * (len(GRID) + 2))
    for name in searched:
        scores = {rate: score(RunRecords.load(options.out / runs[name, rate].name)) for rate in GRID}
        found[name] = max(scores, key=scores.__getitem__)
        print("| " + " | ".join([name, *(f"{value:.2f}" for value in scores.values()), f"{found[name]:g}"]) + " |")
    return found | {name: found[METHODS[name].rate_of] for name in options.methods if METHODS[name].rate_of}


def execute(runs: Iterable[Planned], options: argparse.Namespace, pool: ThreadPoolExecutor) -> None:
    """Run all, so many at a time."""
    where = (options.out, options.data_dir, options.weights_dir)
    for future in [pool.submit(run.execute, *where) for run in runs]:
        future.result()


RECALLS = [f"{a}_to_{b}_r@{k}_full" for a, b in (("image", "text"), ("text", "image")) for k in (1, 10)]


def row(name: str, runs: Sequence[RunRecords]) -> str:
    """A method's figures of the last round: means and spread over seeds."""
    if name == "local":
        recalls = [
            spread(mean(client_values(run, "paired", metric)) for run in runs) for metric in ["r1_sum", *RECALLS]
        ]
    else:
        recalls = [spread(run.last("server")[metric] for run in runs) for metric in ["r1_sum", *RECALLS]]
    accuracies = [spread(mean(client_values(run, group, "accuracy")) for run in runs) for group in ("image", "text")]
    costs = [*traffic(runs), f"{median(sum(run.seconds.values()) for run in runs):.0f}"]
    return "| " + " | ".join([f"{name} ({len(runs)})", *recalls, *accuracies, *costs]) + " |"


def traffic(runs: Sequence[RunRecords]) -> list[str]:
    """MiB that a client of each group receives and sends in a round of training, mean over those that took part."""
    cells = []
    for group in GROUPS:
        found = []
        for direction in ("down", "up"):
            sizes: dict[tuple[int, int, str], int] = {}
            for number, run in enumerate(runs):
                members = set(run.groups.get(group, ()))
                for line in run.transfers:
                    if line.client in members and line.direction == direction and "evaluate" not in line.step:
                        key = (number, line.round, line.client)
                        sizes[key] = sizes.get(key, 0) + line.bytes
            found.append(f"{mean(sizes.values()) / 2**20:.2f}" if sizes else "0")
        cells.append(" / ".join(found))
    return cells


def main() -> None:
    """Run what is missing and print the tables."""
    parser = arguments(__doc__, seeds=3)
    parser.add_argument("--preset", default="fedcola-flickr8k-features")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--search-rounds", type=int, default=6)
    parser.add_argument("--only-search", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        rates = chosen_rates(options, pool)
        if options.only_search:
            return
        runs = {
            (name, seed): planned(name, seed, rates[name], options.rounds, options)
            for seed in range(options.seeds)
            for name in options.methods
        }
        execute(runs.values(), options, pool)
    heads = ["method", "R@1 sum", *(name.removesuffix("_full") for name in RECALLS), "image acc.", "text acc."]
    heads += [f"MiB {group}, down / up" for group in GROUPS] + ["s"]
    print("\n| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for name in options.methods:
        print(row(name, [RunRecords.load(options.out / runs[name, seed].name) for seed in range(options.seeds)]))


if __name__ == "__main__":
    main()
