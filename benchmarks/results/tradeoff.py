"""Bytes against recall (CreamFL, Figure 4): the size of the public set, the width, how much of it crosses, and how.

    python benchmarks/results/tradeoff.py --data-dir DATA --weights-dir WEIGHTS --out runs/tradeoff [--jobs 2]

Each axis is varied alone, the others at their first value; ``--full`` takes all combinations. The axes: items of the
public set (``public.items``), width d of all models, public samples that cross in a round
(``algorithm.public_samples``; 0: all), and the type in which representations cross (``run.transport``). Runs that are
complete are not run again, those that were interrupted are resumed; then a table is printed, and drawn over bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from polyfed.reporting.figures import COLOURS, figure_grid, legend_below, save, styled
from polyfed.reporting.tables import MIB
from polyfed.runs.experiment import read_config
from polyfed.runs.records import RunRecords
from runs import Planned, arguments, spread

METRIC = "r1_sum"
LABELS = {
    "items": "items of P",
    "dim": "width d",
    "samples": "public samples a round",
    "transport": "type on the wire",
}


@dataclass(frozen=True)
class Point:
    """One setting of all axes; of ``samples``, 0 stands for all."""

    items: int
    dim: int
    samples: int
    transport: str

    @property
    def name(self) -> str:
        """For folders."""
        return f"P{self.items}-d{self.dim}-s{self.samples or 'all'}-{self.transport}"

    def overrides(self, config: Mapping[str, Any]) -> list[str]:
        """As the command line has them."""
        return [
            f"public.items={self.items}",
            *(f"{path}={self.dim}" for path in widths(config)),
            f"algorithm.public_samples={self.samples or 'null'}",
            f"run.transport.representations={self.transport}",
        ]


def widths(config: Any, path: str = "") -> Iterator[str]:
    """Where models say how wide they are."""
    if isinstance(config, Mapping) and "encoders" in config:
        yield f"{path}.dim"
        return
    parts = config.items() if isinstance(config, Mapping) else enumerate(config) if isinstance(config, list) else ()
    for key, part in parts:
        yield from widths(part, f"{path}.{key}" if path else str(key))


def axes_of(options: argparse.Namespace) -> dict[str, list[Any]]:
    """Axis -> its values, the usual one first."""
    return {
        "items": options.items,
        "dim": options.dims,
        "samples": options.samples,
        "transport": options.transports,
    }


def points(axes: Mapping[str, list[Any]], *, full: bool) -> list[Point]:
    """All settings, without repetition."""
    if full:
        return [Point(*values) for values in product(*axes.values())]
    usual = Point(**{name: values[0] for name, values in axes.items()})
    return list(dict.fromkeys(replace(usual, **{name: value}) for name, values in axes.items() for value in values))


def planned(options: argparse.Namespace) -> dict[Point, list[Planned]]:
    """The runs of each point, one a seed."""
    config = read_config(options.preset)
    every = [f"run.rounds={options.rounds}", f"run.eval_every={options.eval_every}", "run.evaluate_clients=false"]
    return {
        point: [
            Planned(f"{point.name}-{seed}", options.preset, seed, [*every, *point.overrides(config), *options.set])
            for seed in range(options.seeds)
        ]
        for point in points(axes_of(options), full=options.full)
    }


@dataclass(frozen=True)
class Cost:
    """What a point costs and gives.

    Attributes:
        mib: MiB that the method sent, both ways, mean over seeds; evaluations are left out.
        full: the same in fp32.
        scores: test score of each seed at the round that is best on validation.
    """

    mib: float
    full: float
    scores: list[float]


def measured(folders: list[Path]) -> Cost | None:
    """Of the runs that are complete."""
    runs = [RunRecords.load(folder) for folder in folders if (folder / "report.md").exists()]
    if not runs:
        return None
    sent = [[line for line in run.transfers if not line.step.startswith("evaluate:")] for run in runs]
    scores = []
    for run in runs:
        at, _ = run.best("server", METRIC, "validation") or (run.rounds, 0.0)
        scores.append(run.series("server", METRIC)[at])
    return Cost(
        mean(sum(line.bytes for line in lines) for lines in sent) / MIB,
        mean(sum(line.bytes if line.full is None else line.full for line in lines) for lines in sent) / MIB,
        scores,
    )


def table(found: Mapping[Point, Cost]) -> list[str]:
    """Markdown, cheapest first."""
    head = [*LABELS.values(), "MiB", "MiB in fp32", "R@1 sum", "seeds"]
    rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for point, cost in sorted(found.items(), key=lambda entry: entry[1].mib):
        values = [str(value) for value in astuple(replace(point, samples=point.samples or "all"))]  # type: ignore[arg-type]
        cells = [*values, f"{cost.mib:.2f}", f"{cost.full:.2f}", spread(cost.scores), str(len(cost.scores))]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


@styled
def draw(found: Mapping[Point, Cost], axes: Mapping[str, list[Any]], preset: str, path: Path) -> Path:
    """One line an axis over MiB (logarithmic), through the points at which the others have their usual value."""
    figure, (place,) = figure_grid(1, 1, width=7, height=4.5, title=f"{Path(preset).stem}: bytes against recall")
    usual = Point(**{name: values[0] for name, values in axes.items()})
    for number, item in enumerate(fields(Point)):
        if len(axes[item.name]) < 2:
            continue
        line = {value: found.get(replace(usual, **{item.name: value})) for value in axes[item.name]}
        known = sorted(
            ((cost.mib, mean(cost.scores), value or "all") for value, cost in line.items() if cost),
            key=lambda entry: entry[0],
        )
        sizes, scores = [entry[0] for entry in known], [entry[1] for entry in known]
        common = axes[item.name][0] or "all"
        place.plot(sizes, scores, marker="o", color=COLOURS[number], label=f"{LABELS[item.name]} (else {common})")
        for size, score, value in known:
            if value != common:  # that point is in all lines
                place.annotate(str(value), (size, score), xytext=(4, 4), textcoords="offset points", fontsize=8)
    place.set(xscale="log", xlabel="MiB sent by the method in the whole run", ylabel="R@1 sum, percent")
    legend_below(place, columns=2)
    return save(figure, path)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__, seeds=1)
    parser.add_argument("--preset", default="exchange-creamfl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eval-every", type=int, default=1)
    parser.add_argument("--items", type=int, nargs="+", default=[1000, 150, 500, 2000])
    parser.add_argument("--dims", type=int, nargs="+", default=[256, 64, 128, 512])
    parser.add_argument("--samples", type=int, nargs="+", default=[0, 200, 500, 1000])
    parser.add_argument("--transports", nargs="+", default=["float32", "float16", "int8"])
    parser.add_argument("--full", action="store_true", help="all combinations")
    parser.add_argument("--set", action="append", default=[])
    return parser.parse_args()


def main() -> None:
    """Run what is missing, print the table and draw it."""
    options = parsed()
    plan = planned(options)
    where = (options.out, options.data_dir, options.weights_dir)
    with ThreadPoolExecutor(options.jobs) as pool:
        for future in [pool.submit(run.execute, *where) for runs in plan.values() for run in runs]:
            future.result()
    costs = {point: measured([options.out / run.name for run in runs]) for point, runs in plan.items()}
    found = {point: cost for point, cost in costs.items() if cost is not None}
    print(*table(found), "", draw(found, axes_of(options), options.preset, options.out / "tradeoff.png"), sep="\n")


if __name__ == "__main__":
    main()
