"""The tables of docs/results.md on two orderings, of FedCola and of FedAID against FedAvg, each at equal terms.

    python benchmarks/results/orderings.py --data-dir DATA --weights-dir WEIGHTS --out runs/orderings [--jobs 2]

``fedcola-scratch`` and ``fedcola-pretrained``: long rounds, and beside FedAvg a FedAvg whose server takes steps of
n_vl / sum n, which is how far compensation lets the paired clients' model move, so that damping is not taken for
collaboration. FedAvg's models of other types do not act on that model, so that its rows are of paired clients alone,
the same ones in every round. ``fedaid``: rows of ``medical.py batches``, at as many batches in all, and at as many of
the encoders.

Learning rates are chosen from a grid on a seed of their own, after fewer rounds, by recalls on validation data. Runs
that are complete are not run again, those that were interrupted are resumed; then means and paired differences with
Student's intervals are printed.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from medical import Plan, figures
from medical_tables import HEADS, TABLES
from transfer import METHODS, RECALLS, SEARCH_SEED, score

from polyfed.analysis.partitions import planned as dealt
from polyfed.reporting.compare import Comparison
from polyfed.reporting.paired import PairedDifference, paired_table
from polyfed.runs.config_files import read_config
from polyfed.runs.experiment import Experiment
from polyfed.runs.records import RunRecords
from runs import Planned, spread

Figures = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Row -> seed -> figure -> value."""

PRESETS = {"fedcola-scratch": "fedcola-flickr8k-features", "fedcola-pretrained": "fedcola-flickr8k-pretrained"}
GRID = (0.0005, 0.001, 0.002, 0.004, 0.008)
STEPS = 140
"""Batches a client and round: of the paired clients 3.4 passes, where the paper has five."""
FEDAVG, DAMPED, FEDCOLA = "fedavg", "fedavg, server rate n_vl / sum n", "fedcola"
AID_PAIRS = (  # as many batches in all, then as many of the encoders
    ("fedaid", "fedavg"),
    ("fedaid", "fedavg, 10 batches"),
    ("fedaid, 20 + 20 batches", "fedavg"),
)
COLA_PAIRS = ((FEDCOLA, FEDAVG), (DAMPED, FEDAVG), (FEDCOLA, DAMPED))


@dataclass(frozen=True)
class Long:
    """FedCola and FedAvg on one preset, with long rounds.

    Attributes:
        out: folder of the runs.
        preset: federation and blocks.
        server_rate: n_vl / sum n.
    """

    out: Path
    preset: str
    server_rate: float

    def rows(self) -> dict[str, tuple[str, ...]]:
        """Row -> overrides."""
        step = f"{{name: momentum, momentum: 0, lr: {self.server_rate:.4f}}}"
        fedavg = METHODS["fedavg"].overrides
        damped = (*fedavg, f"algorithm.averaging={{name: by_type, server_optimizer: {step}}}")
        return {FEDAVG: fedavg, DAMPED: damped, FEDCOLA: METHODS["fedcola"].overrides}

    def planned(self, row: str, rate: float, seed: int, rounds: int, extra: Sequence[str] = ()) -> Planned:
        """A run of a row."""
        groups = ("paired", "image", "text") if row == FEDCOLA else ("paired",)
        rates = [f"clients.{group}.training.optimizer.lr={rate}" for group in groups]
        overrides = [*self.rows()[row], *rates, f"algorithm.local_steps={STEPS}"]
        overrides += [f"run.rounds={rounds}", f"run.eval_every={rounds}"]
        overrides += ["run.evaluate_clients=false", "run.plots=false", *extra]
        name = f"{row}-lr{rate:g}-t{rounds}-{seed}".replace(" / ", "-by-").replace(" ", "-").replace(",", "")
        return Planned(name, str(self._written(groups)), seed, overrides)

    def search(self, rates: Sequence[float], rounds: int) -> dict[tuple[str, float], Planned]:
        """(row, rate) -> its run on the seed of the search."""
        return {(row, rate): self.planned(row, rate, SEARCH_SEED, rounds) for rate in rates for row in self.rows()}

    def final(self, rates: Mapping[str, float], seeds: int, rounds: int) -> dict[tuple[str, int], Planned]:
        """(row, seed) -> its run; validated no more, so that the last round counts."""
        last = ("server.validation_split=null",)
        return {
            (row, seed): self.planned(row, rates[row], seed, rounds, last) for seed in range(seeds) for row in rates
        }

    def _written(self, groups: Sequence[str]) -> Path:
        """The preset with these groups; paired clients first, whose draw then does not depend on the others."""
        content = read_config(self.preset)
        content["clients"] = {group: content["clients"][group] for group in groups}
        path = self.out / "configs" / f"{'-'.join(groups)}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path


def server_rate(preset: str, data_dir: Path) -> float:
    """n_vl / sum n over all clients, which a cohort, so large a share of each group, has in the mean."""
    experiment = Experiment.load(preset, [f"data.dir={data_dir}"])
    held = dealt(experiment).holdings.values()
    return sum(held.samples for held in held if held.group == "paired") / sum(held.samples for held in held)


def execute(runs: Iterable[Planned], out: Path, options: argparse.Namespace, pool: ThreadPoolExecutor) -> None:
    """Run all, so many at a time; records alone are kept."""

    def without_models(folder: Path) -> None:
        shutil.rmtree(folder / "models", ignore_errors=True)

    where = (out, options.data_dir, options.weights_dir, without_models)
    for future in [pool.submit(run.execute, *where) for run in runs]:
        future.result()


def fedcola(table: str, options: argparse.Namespace, pool: ThreadPoolExecutor) -> None:
    """Search, run and print one of FedCola's tables."""
    preset = PRESETS[table]
    long = Long(options.out / table, preset, server_rate(preset, options.data_dir))
    searched = long.search(GRID, options.search_rounds)
    execute(searched.values(), long.out, options, pool)
    scores = {key: score(RunRecords.load(long.out / run.name)) for key, run in searched.items()}
    rates = {row: max(GRID, key=lambda rate: scores[row, rate]) for row in long.rows()}
    print(f"\nserver rate {long.server_rate:.4f}; validation recall after {options.search_rounds} rounds:\n")
    print_rows(
        ["method", *(f"lr {rate:g}" for rate in GRID), "chosen"],
        [[row, *(f"{scores[row, rate]:.2f}" for rate in GRID), f"{best:g}"] for row, best in rates.items()],
    )
    runs = long.final(rates, options.seeds, options.rounds)
    execute(runs.values(), long.out, options, pool)
    found: dict[str, dict[int, dict[str, float]]] = {row: {} for row in rates}
    for (row, seed), run in runs.items():
        last = RunRecords.load(long.out / run.name).last("server")
        found[row][seed] = {name.removesuffix("_full"): last[name] for name in ("r1_sum", *RECALLS)}
    print_table(table, found, COLA_PAIRS, ("r1_sum",))


def fedaid(options: argparse.Namespace, pool: ThreadPoolExecutor) -> None:
    """Search, run and print FedAID's table."""
    settings: dict[str, Any] = {"set": [], "tasks": ["clients"], "rate": [], "draws": 3, "rounds": 5}
    settings |= {"out": options.out / "fedaid", "seeds": options.seeds}
    settings |= {"data_dir": options.data_dir, "weights_dir": options.weights_dir}
    settings["out"].mkdir(parents=True, exist_ok=True)
    rows = {row: TABLES["batches"][row] for pair in AID_PAIRS for row in pair}
    plan = Plan("batches", rows, argparse.Namespace(**settings), pool)
    found: dict[str, dict[int, dict[str, float]]] = {row: {} for row in plan.rows}
    for (row, seed), run in plan.runs(plan.rates()).items():
        values = figures(settings["out"] / run.name, ["clients"])
        found[row][seed] = dict(zip(HEADS["clients"], values, strict=True))
    print_table("fedaid", found, AID_PAIRS, ("Rec@1", "Rec@5"))


# ---- printing


def print_rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table."""
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for cells in rows:
        print("| " + " | ".join(cells) + " |")


def differences(found: Figures, pairs: Iterable[tuple[str, str]], names: Sequence[str]) -> list[PairedDifference]:
    """Row less row, seed by seed, of each pair and named figure."""

    def gap(row: str, other: str, name: str) -> PairedDifference:
        by_seed = {seed: values[name] - found[other][seed][name] for seed, values in found[row].items()}
        return PairedDifference(Comparison(f"{row} - {other}", (), {}), Comparison(other, (), {}), name, by_seed)

    return [gap(row, other, name) for row, other in pairs for name in names]


def print_table(title: str, found: Figures, pairs: Iterable[tuple[str, str]], names: Sequence[str]) -> None:
    """Means and spread over seeds, then paired differences of the named figures."""
    heads = list(next(iter(next(iter(found.values())).values())))
    print(f"\n### {title}\n")
    print_rows(
        ["method (seeds)", *heads],
        [
            [f"{row} ({len(seeds)})", *(spread(values[head] for values in seeds.values()) for head in heads)]
            for row, seeds in found.items()
        ],
    )
    table = paired_table(differences(found, pairs, names), [])
    print()
    print_rows(table.columns, table.rows)


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--weights-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6, help="of FedCola's tables")
    parser.add_argument("--search-rounds", type=int, default=3, help="of FedCola's tables")
    tables = ["fedaid", *PRESETS]
    parser.add_argument("--tables", nargs="+", default=tables, choices=tables, metavar="TABLE", help=", ".join(tables))
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        for table in options.tables:
            if table == "fedaid":
                fedaid(options, pool)
            else:
                fedcola(table, options, pool)


if __name__ == "__main__":
    main()
