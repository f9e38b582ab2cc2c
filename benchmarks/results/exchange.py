"""The table of docs/results.md on representation exchange: FedAFD and its baselines on Flickr8k, CIFAR-100, AG_NEWS.

    python benchmarks/results/exchange.py --data-dir DATA --weights-dir WEIGHTS --out runs/exchange [--jobs 2]

First the clients' learning rate of each method is chosen from one grid, on a seed of its own and a part of the rounds,
by what the clients reach on validation data; then every method runs with every seed. Runs that are complete are not run
again, those that were interrupted are resumed; then the tables are printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean, median

from polyfed.runs.records import RunRecords
from runs import Planned, arguments, client_values, spread

GRID = (0.0005, 0.002, 0.008)
SEARCH_SEED = 100
GROUPS = {"image": "accuracy", "text": "accuracy", "paired": "r1_sum"}
VALIDATED = tuple(f"clients.{group}.test_split=validation" for group in GROUPS)


@dataclass(frozen=True)
class Method:
    """A row: preset, overrides, the row whose learning rate it shares, and whether it has clients and a server."""

    preset: str
    overrides: tuple[str, ...] = ()
    rate_of: str = ""
    clients: bool = True
    server: bool = True


def _fedafd(*overrides: str) -> Method:
    return Method("fedafd-flickr8k-pretrained", tuple(f"algorithm.{text}" for text in overrides), "fedafd")


METHODS: Mapping[str, Method] = {
    "local": Method("exchange-local", server=False),
    "server-only": Method("exchange-server-only", clients=False),
    "fedmd": Method("exchange-fedmd"),
    "fedgems": Method("exchange-fedgems"),
    "fedet": Method("exchange-fedet"),
    "creamfl": Method("exchange-creamfl"),
    "fedmkd": Method("exchange-fedmkd"),
    "margin": Method("exchange-margin"),
    "fedproto": Method("exchange-fedproto", server=False),
    "fedtgp": Method("exchange-fedtgp", server=False),
    "fedafd": Method("fedafd-flickr8k-pretrained"),
    "fedafd-k3": _fedafd("broadcast_every=3"),
    "fedafd-no-baa": Method("fedafd-no-baa", rate_of="fedafd"),
    "fedafd-no-gff": Method("fedafd-no-gff", rate_of="fedafd"),
    "fedafd-no-sed": _fedafd("aggregation=mean"),
    "fedafd-paired-only": _fedafd("aggregation=paired_only"),
    "fedafd-int8": Method("fedafd-flickr8k-pretrained", ("run.transport.dtype=int8",), "fedafd"),
    "creamfl-int8": Method("exchange-creamfl", ("run.transport.dtype=int8",), "creamfl"),
}


def planned(
    name: str, seed: int, rate: float, rounds: int, options: argparse.Namespace, extra: Sequence[str]
) -> Planned:
    """A run of a method."""
    rates = [f"clients.{group}.training.optimizer.lr={rate}" for group in GROUPS]
    every = [f"run.rounds={rounds}", f"run.eval_every={rounds}", "run.plots=false"]
    method = METHODS[name]
    overrides = [*method.overrides, *rates, *every, *extra, *options.set]
    return Planned(f"{name}-lr{rate:g}-t{rounds}-{seed}", method.preset, seed, overrides)


def score(records: RunRecords) -> float:
    """What a learning rate is chosen by: image and text accuracy and the paired clients' R@1 sum, added."""
    return sum(mean(client_values(records, group, metric)) for group, metric in GROUPS.items())


def chosen_rates(options: argparse.Namespace, pool: ThreadPoolExecutor) -> dict[str, float]:
    """Method -> the clients' learning rate, of the grid."""
    searched = [name for name in options.methods if not METHODS[name].rate_of and METHODS[name].clients]
    runs = {
        (name, rate): planned(name, SEARCH_SEED, rate, options.search_rounds, options, VALIDATED)
        for rate in GRID
        for name in searched
    }
    execute(runs.values(), options, pool)
    found = {name: 0.002 for name in options.methods}
    print("| method | " + " | ".join(f"lr {rate:g}" for rate in GRID) + " | chosen |\n|" + "---|" * (len(GRID) + 2))
    for name in searched:
        scores = {rate: score(RunRecords.load(options.out / runs[name, rate].name)) for rate in GRID}
        found[name] = max(scores, key=scores.__getitem__)
        print("| " + " | ".join([name, *(f"{value:.2f}" for value in scores.values()), f"{found[name]:g}"]) + " |")
    shared = {name: METHODS[name].rate_of for name in options.methods if METHODS[name].rate_of}
    return found | {name: found.get(other, 0.002) for name, other in shared.items()}


def execute(runs: Iterable[Planned], options: argparse.Namespace, pool: ThreadPoolExecutor) -> None:
    """Run all, so many at a time."""
    where = (options.out, options.data_dir, options.weights_dir)
    for future in [pool.submit(run.execute, *where) for run in runs]:
        future.result()


RECALLS = ["image_to_text_r@1_full", "text_to_image_r@1_full"]


def row(name: str, runs: Sequence[RunRecords]) -> str:
    """A method's figures of the last round: means and spread over seeds."""
    method, none = METHODS[name], "-"
    cells = [f"{name} ({len(runs)})"]
    for group, metric in (
        ("image", "accuracy"),
        ("text", "accuracy"),
        *(("paired", metric) for metric in (*RECALLS, "r1_sum")),
    ):
        cells.append(spread(mean(client_values(run, group, metric)) for run in runs) if method.clients else none)
    for metric in ("image_to_text_r@1", "text_to_image_r@1", "r1_sum"):
        cells.append(spread(run.last("server")[metric] for run in runs) if method.server else none)
    seconds = median(median(run.seconds.values()) for run in runs)
    return "| " + " | ".join([*cells, *traffic(runs), f"{seconds:.1f}"]) + " |"


def traffic(runs: Sequence[RunRecords]) -> list[str]:
    """MiB that an image, a text and a paired client receive and send in a round, mean over rounds."""
    cells = []
    for group in GROUPS:
        found = {"down": 0, "up": 0}
        for run in runs:
            for line in run.transfers:
                if line.client in run.groups.get(group, ()) and "assess" not in line.step:
                    found[line.direction] += line.bytes
        each = sum(len(run.seconds) * len(run.groups.get(group, ())) for run in runs) or 1
        cells.append(" / ".join(f"{size / each / 2**20:.2f}" for size in found.values()))
    return cells


def main() -> None:
    """Run what is missing and print the tables."""
    parser = arguments(__doc__, seeds=3)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--search-rounds", type=int, default=3)
    parser.add_argument("--only-search", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        rates = chosen_rates(options, pool)
        if options.only_search:
            return
        runs = {
            (name, seed): planned(name, seed, rates[name], options.rounds, options, ())
            for seed in range(options.seeds)
            for name in options.methods
        }
        execute(runs.values(), options, pool)
    heads = [
        "method",
        "image acc.",
        "text acc.",
        "paired i2t R@1",
        "t2i R@1",
        "paired R@1 sum",
        "server i2t R@1",
        "t2i R@1",
        "R@1 sum",
    ]
    heads += [f"MiB {group}, down / up" for group in GROUPS] + ["s a round"]
    print("\n| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for name in options.methods:
        print(row(name, [RunRecords.load(options.out / runs[name, seed].name) for seed in range(options.seeds)]))


if __name__ == "__main__":
    main()
