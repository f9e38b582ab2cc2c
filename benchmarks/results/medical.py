"""The tables of docs/results.md on federated medical vision-language pre-training (FedAID's Table 1 and its sweeps).

    python benchmarks/results/medical.py main --data-dir DATA --weights-dir WEIGHTS --out runs/medical [--jobs 2]
    python benchmarks/results/medical.py main batches guidance backbones ... the same; also clients, rho, cxr
    python benchmarks/results/medical.py guidance --only "contrastive guidance" "averaged aligner" ... some rows

First the learning rate of each method is chosen from one grid, on a seed of its own and half of the rounds, by recalls
on the clients' validation data; then every row runs with every seed and is put to the downstream tasks of the suite
``medical``. The table is printed, and below it what galleries in random order would give, and the differences of
rows that belong together, seed by seed. Rows that tables share are run once. Runs that are complete are not run again,
those that were interrupted are resumed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from medical_tables import HEADS, PAIRS, RATE, TABLES, Row, selected, tasks_of

from polyfed.downstream.model_choice import ModelChoice
from polyfed.downstream.suite import Suite, run_suite
from polyfed.runs.records import RunRecords
from runs import Planned, arguments, client_values, spread

GRID = (0.0003, 0.001, 0.003)
SEARCH_SEED = 100
RECALLS = tuple(f"{direction}_r@{k}" for direction in ("image_to_text", "text_to_image") for k in (5, 10))


@dataclass(frozen=True)
class Plan:
    """All that the runs of a table have in common.

    Attributes:
        table: its name.
        rows: those that are made, by name.
        options: of the command.
        pool: where runs and tests are carried out.
    """

    table: str
    rows: Mapping[str, Row]
    options: argparse.Namespace
    pool: ThreadPoolExecutor

    def run(self, name: str, seed: int, rate: float, rounds: int, extra: Sequence[str] = ()) -> Planned:
        """A run of a row."""
        row = TABLES[self.table][name]
        every = [f"{RATE}={rate}", f"run.rounds={rounds}", f"run.eval_every={rounds}"]
        overrides = [*every, "run.plots=false", *extra, *row.overrides, *self.options.set]
        mark = hashlib.sha256(json.dumps([row.preset, overrides]).encode()).hexdigest()[:8]
        return Planned(
            f"{name}-lr{rate:g}-{seed}-{mark}".replace(" ", "-").replace(",", ""), row.preset, seed, overrides
        )

    def execute(self, runs: Iterable[Planned], tests: Mapping[str, Sequence[str]] | None = None) -> None:
        """Run all, so many at a time; with ``tests`` (name of a run -> arguments) they are tested afterwards."""
        options = self.options

        def work(planned: Planned) -> None:
            def after(folder: Path) -> None:
                if tests is not None:
                    _test_apart(folder, tests[planned.name], options)

            planned.execute(options.out, options.data_dir, options.weights_dir, after)

        for future in [self.pool.submit(work, run) for run in runs]:
            future.result()

    def test_arguments(self, name: str, judge: Planned | None) -> list[str]:
        """What the test of a row is called with."""
        row = self.rows[name]
        found = ["--tested", row.tested, "--tasks", *self.tasks(row)]
        return found if judge is None else [*found, "--judged-by", str(self.options.out / judge.name)]

    def tasks(self, row: Row | None = None) -> list[str]:
        """The tasks of the table, or of one of its rows, that are wanted."""
        return [task for task in tasks_of(self.table, row) if task in self.options.tasks]

    def runs(self, rates: Mapping[str, float]) -> dict[tuple[str, int], Planned]:
        """(row, seed) -> its run, carried out and tested."""
        options = self.options
        runs = {
            (name, seed): self.run(name, seed, rates[name], options.rounds)
            for seed in range(options.seeds)
            for name in self.rows
        }
        judges = {key: runs.get((self.rows[key[0]].judged_by, key[1])) for key in runs}
        tests = {run.name: self.test_arguments(key[0], judges[key]) for key, run in runs.items()}
        for judged in (False, True):  # whose clients judge must be there first
            self.execute([run for key, run in runs.items() if (judges[key] is not None) == judged], tests)
        return runs

    def rates(self) -> dict[str, float]:
        """Row -> learning rate, of the grid; printed with the scores that chose it."""
        rows = TABLES[self.table]
        given = {preset: float(rate) for preset, _, rate in (text.partition("=") for text in self.options.rate)}
        searched = [
            name
            for name, row in rows.items()
            if not row.rate_of and row.preset not in given and self._gives_a_rate(name)
        ]
        half = (self.options.rounds + 1) // 2
        validated = ("clients.hospital.test_split=validation", "server.test_split=validation")
        runs = {(name, rate): self.run(name, SEARCH_SEED, rate, half, validated) for rate in GRID for name in searched}
        self.execute(runs.values())
        found = self._kept_rates() | given
        if searched:
            print("| method | " + " | ".join(f"lr {rate:g}" for rate in GRID) + " | chosen |\n|" + "---|" * 5)
        for name in searched:
            scores = {rate: self._score(name, runs[name, rate]) for rate in GRID}
            best = found[rows[name].preset] = max(scores, key=scores.__getitem__)
            print("| " + " | ".join([name, *(f"{value:.2f}" for value in scores.values()), f"{best:g}"]) + " |")
        (self.options.out / "rates.json").write_text(json.dumps(found, indent=1))
        return {name: found[_preset_of(row)] for name, row in self.rows.items()}

    def _gives_a_rate(self, name: str) -> bool:
        """Whether a row's learning rate is its own, or that of a row that is made."""
        return name in self.rows or any(row.rate_of == name for row in self.rows.values())

    def _score(self, name: str, run: Planned) -> float:
        """Recalls on validation data, added: the server's among all of it; of LOCAL every client's among its own."""
        records = RunRecords.load(self.options.out / run.name)
        if TABLES[self.table][name].tested == "clients":
            return sum(mean(client_values(records, "hospital", metric)) for metric in RECALLS)
        return sum(records.last("server")[metric] for metric in RECALLS)

    def _kept_rates(self) -> dict[str, float]:
        file = self.options.out / "rates.json"
        return dict(json.loads(file.read_text())) if file.is_file() else {}


def _preset_of(row: Row) -> str:
    """The preset whose learning rate a row has."""
    base = "cxr" if "cxr" in row.preset else "medpix"
    shared = {"fedavg": f"{base}-fedavg", "fedaid": "fedaid-medpix", "feddra": f"{base}-feddra"}
    return shared[row.rate_of] if row.rate_of else row.preset


# ---- downstream


def _test_apart(folder: Path, arguments: Sequence[str], options: argparse.Namespace) -> None:
    """In a process of its own, as the runs."""
    command = [sys.executable, __file__, "test", "--data-dir", str(options.data_dir), *arguments]
    command += ["--weights-dir", str(options.weights_dir), "--out", str(folder), "--draws", str(options.draws)]
    with folder.with_name(f"{folder.name}.test.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test(options: argparse.Namespace) -> None:
    """Put a run to the downstream tasks and write what was found beside its records."""
    suite = Suite.load("medical").chosen(options.tasks)
    base = ModelChoice(
        options.out,
        None if options.tested == "clients" else "last",
        None,
        None,
        42,
        options.data_dir,
        options.weights_dir,
    )
    names: list[str | None] = [None]
    if options.tested == "clients":
        names = list(RunRecords.load(options.out).groups["hospital"])
    found = []
    for name in names:
        opened = replace(base, client=name).open()
        subject = opened.subject
        if options.judged_by:
            judge = replace(base, run=options.judged_by).open().subject
            subject = replace(subject, clients=judge.clients)
        found.append(run_suite(subject, suite, opened.data, name="medical", draws=options.draws).to_json())
    (options.out / "downstream.json").write_text(json.dumps(found))


def figures(folder: Path, tasks: Sequence[str]) -> list[float]:
    """The row's figures of one run, in the order of ``HEADS``, each a mean over the models that were tested."""
    found = [each["tasks"] for each in json.loads((folder / "downstream.json").read_text())]
    return [value for task in tasks for value in _figures(found, task)]


def _figures(found: Sequence[Mapping[str, Any]], task: str) -> list[float]:
    def of(on: str, metric: str) -> float:
        rows = [next(row for row in each[task]["rows"] if row["on"].startswith(on)) for each in found]
        return mean(float(row["metrics"][metric]["mean"]) for row in rows)

    if task == "clients":
        return _retrieval(found)
    if task == "other":
        return [of("", "text_to_image_r@5")]
    metric, shares = ("dice", ("10 %", "100 %")) if task == "opacity" else ("accuracy", ("1 %", "10 %"))
    if task == "pneumonia":
        return [of(share, metric) for share in (*shares, "100 %")] + [of("10 %", "auroc")]
    return [of(share, metric) for share in shares]


def _retrieval(found: Sequence[Mapping[str, Any]], what: str = "text_to_image_r@{}") -> list[float]:
    """Text to picture in batches: mean over clients, worst client and disparity of the mean over models."""
    by_cutoff = {}
    for cutoff in (1, 5):
        values = [
            mean(
                next(row for row in each["clients"]["rows"] if row["on"] == client)["metrics"][what.format(cutoff)][
                    "mean"
                ]
                for each in found
            )
            for client in (row["on"] for row in found[0]["clients"]["rows"])
            if client.startswith("hospital")
        ]
        by_cutoff[cutoff] = values
    one, five = by_cutoff[1], by_cutoff[5]
    return [mean(one), mean(five), min(one), min(five), max(five) - min(five)]


def chance(folder: Path) -> list[float]:
    """The same figures of retrieval on the clients' test samples, of galleries in random order."""
    found = [each["tasks"] for each in json.loads((folder / "downstream.json").read_text())]
    return _retrieval(found, "chance_r@{}")


def print_table(plan: Plan, runs: Mapping[tuple[str, int], Planned]) -> None:
    """A line a row, chance, and the differences of rows that belong together."""
    options, tasks = plan.options, plan.tasks()

    def seeds_of(name: str, shown: Sequence[str]) -> list[list[float]]:
        return [figures(options.out / runs[name, seed].name, shown) for seed in range(options.seeds)]

    heads = ["method", *(head for task in tasks for head in HEADS[task])]
    print("\n| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for name in plan.rows:
        print(
            "| " + " | ".join([name, *(spread(values) for values in zip(*seeds_of(name, tasks), strict=True))]) + " |"
        )
    by_chance = [chance(options.out / runs[next(iter(plan.rows)), seed].name) for seed in range(options.seeds)]
    print(f"\nchance, {', '.join(HEADS['clients'])}: {', '.join(spread(v) for v in zip(*by_chance, strict=True))}")
    pairs = [pair for pair in PAIRS[plan.table] if set(pair) <= set(plan.rows)]
    columns = ["row less row", *HEADS["clients"], "above at Rec@1 / Rec@5"]
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for name, other in pairs:
        both = zip(seeds_of(name, ["clients"]), seeds_of(other, ["clients"]), strict=True)
        gaps = [[a - b for a, b in zip(*pair, strict=True)] for pair in both]
        above = " / ".join(f"{sum(gap[k] > 0 for gap in gaps)} of {len(gaps)}" for k in (0, 1))
        cells = [f"{name} - {other}", *(spread(values) for values in zip(*gaps, strict=True)), above]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    """Run what is missing and print the table."""
    parser = arguments(__doc__, seeds=3)
    parser.add_argument("tables", nargs="+", choices=[*TABLES, "test"], metavar="table", help=", ".join(TABLES))
    parser.add_argument("--tested", default="server", help=argparse.SUPPRESS)
    parser.add_argument("--judged-by", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tasks", nargs="+", default=list(HEADS), choices=HEADS, help="downstream tasks; default: all")
    parser.add_argument(
        "--rate", action="append", default=[], metavar="PRESET=RATE", help="this rate, without a search"
    )
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="these rows and those they go with")
    parser.add_argument("--only-search", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    if options.tables == ["test"]:
        test(options)
        return
    unknown = [row for row in options.only if not any(row in TABLES[table] for table in options.tables)]
    if unknown:
        valid = "; ".join(name for table in options.tables for name in TABLES[table])
        parser.error(f"no row '{unknown[0]}' in {', '.join(options.tables)}; valid: {valid}")
    options.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for table in options.tables:
            rows = selected(table, options.only)
            if not rows:
                continue
            print(f"\n## {table}")
            plan = Plan(table, rows, options, pool)
            rates = plan.rates()
            if not options.only_search:
                print_table(plan, plan.runs(rates))


if __name__ == "__main__":
    main()
