"""All benchmarks that say something against a limit or a rival, then one table of their figures, and a record.

    python benchmarks/all.py                  # the plan: half an hour on two cores
    python benchmarks/all.py --plan short     # memory by clients, averaging, one round: three minutes
    python benchmarks/all.py --plan deployed  # a real deployment, and its memory: apart, as it takes long
    python benchmarks/all.py --plan gpu       # a GPU beside the CPU and plain PyTorch; one line where there is none
    python benchmarks/all.py --plan clients   # cost and memory of 10 to 10,000 clients: a quarter of an hour
    python benchmarks/all.py --plan rivals    # other libraries, each in an environment that is made the first time

Each benchmark is a process of its own; its figures and their limits are the lines that ``harness.report`` prints. One
that fails, or lacks data, says so in the table, and the others go on. Exit status 1 if one fails, or a figure lies
outside its limit. Data sets and weights are looked for in POLYFED_DATA and POLYFED_WEIGHTS.
``--record FILE`` keeps the figures, in place of what the file has of the same benchmarks; `make pages` makes the
tables of docs/reference/speed.md of them.

No plan has: the largest sizes and most repetitions of its benchmarks, kills (``kills.py``), the level of studies'
verdicts (``verdicts.py``), and what runs give away (``leakage.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).resolve().parent
PLANS: Mapping[str, Sequence[str]] = {
    "whole": (
        *("losses", "gca", "weights --quick", "evaluation", "transport", "aggregation", "crowds", "engine --quick"),
        *("released_round", "real_round", "gates", "backbone", "adapters", "secure_sum --quick --samples 2000"),
        *("engines --quick --engines local ray flower", "studies"),
    ),
    "short": (
        "crowds --sizes 500k --clients 300",
        "aggregation --quick",
        "released_round --encoders perceptron --public 100",
    ),
    "gpu": ("gpu",),
    "clients": ("peers --rivals --models perceptron --clients 10 100 1000 10000 --rounds 2 --repeats 1",),
    "rivals": ("peers --rivals pfl_research --models perceptron",),
    "deployed": ("engines --engines deployment", "engines --memory --sizes 100MB"),
}
"""Benchmarks with their arguments."""


class Outcome(NamedTuple):
    """What a benchmark left: its figures, how long it took, what it lacks, and why it failed, if it did."""

    benchmark: str
    figures: list[dict[str, Any]]
    seconds: float
    lacks: str | None
    error: str | None


def run(benchmark: str) -> Outcome:
    """Run a benchmark, and show its lines as they come."""
    began, found = time.monotonic(), []
    name, *arguments = benchmark.split()
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    found.append(json.loads(line))
                    line = f"not measured: lacks {lacks}\n" if (lacks := found[-1].get("lacks")) else line
                print(f"{name}: {line}", end="", flush=True)
        errors.seek(0)
        said = errors.read().strip().splitlines()
    error = None if found else "no figures"
    if process.returncode != 0:
        error = said[-1] if said else f"exit status {process.returncode}"
    lacks = next((line["lacks"] for line in found if "lacks" in line), None)
    return Outcome(benchmark, [line for line in found if "ratio" in line], time.monotonic() - began, lacks, error)


def verdict(figure: Mapping[str, Any]) -> str:
    """Whether a figure is within its limit."""
    return {True: "within", False: "OUTSIDE", None: "no limit"}[figure["within"]]


def limit(figure: Mapping[str, Any]) -> str:
    """What a figure may be."""
    sign = "<=" if figure["better"] == "smaller" else ">="
    return "" if figure["limit"] is None else f"{sign} {figure['limit']:g}"


def table(outcomes: Sequence[Outcome]) -> str:
    """All figures with their limits, and how long each benchmark took."""
    rows = [("figure", "measured", "limit", "", "against")]
    for outcome in outcomes:
        rows += [
            (f["name"], f"{f['ratio']:g} {f['unit']}".strip(), limit(f), verdict(f), f["against"])
            for f in outcome.figures
        ]
        rows += [(outcome.benchmark, "", "", "LACKS", outcome.lacks)] if outcome.lacks else []
        rows += [(outcome.benchmark, "", "", "FAILED", outcome.error)] if outcome.error else []
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
    ]
    took = [f"{outcome.seconds:6.0f} s  {outcome.benchmark}" for outcome in outcomes]
    together = sum(outcome.seconds for outcome in outcomes)
    return "\n".join([*lines, "", *took, f"{together:6.0f} s  together"])


def machine() -> dict[str, Any]:
    """The machine in general words."""
    found = {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()}
    found |= {"python": platform.python_version(), "torch": torch.__version__}
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def commit() -> str:
    """The commit that is measured; with a plus where files were changed since."""

    def told(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()

    changed = told("status", "--porcelain", "--untracked-files=no", "--", "../src", "*.py")
    return told("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")


def record(outcomes: Sequence[Outcome], before: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept, with what is known ``before`` of other benchmarks."""
    kept = ("name", "ratio", "unit", "against", "limit", "better", "within")
    where = {"commit": commit(), "date": datetime.now(UTC).date().isoformat(), "machine": machine()}
    new = [
        {
            "benchmark": outcome.benchmark,
            "seconds": round(outcome.seconds),
            "lacks": outcome.lacks,
            "failed": outcome.error is not None,
            "figures": [{key: figure[key] for key in kept} for figure in outcome.figures],
            **where,
        }
        for outcome in outcomes
    ]
    names = {each["benchmark"] for each in new}
    others = [each for each in before.get("benchmarks", ()) if each["benchmark"] not in names]
    return {"plan": list(PLANS["whole"]), "benchmarks": [*others, *new]}


def main() -> int:
    """Run a plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=PLANS, default="whole")
    parser.add_argument("--record", type=Path, help="where to keep the figures")
    options = parser.parse_args()
    outcomes = [run(benchmark) for benchmark in PLANS[options.plan]]
    if all(outcome.lacks and not outcome.figures and outcome.error is None for outcome in outcomes):
        return 0  # each has said what it lacks
    print(f"\n{table(outcomes)}")
    if options.record is not None:
        before = json.loads(options.record.read_text()) if options.record.is_file() else {}
        options.record.write_text(json.dumps(record(outcomes, before), indent=1) + "\n")
    figures = [figure for outcome in outcomes for figure in outcome.figures]
    failed = [outcome.benchmark for outcome in outcomes if outcome.error is not None]
    outside = [figure["name"] for figure in figures if figure["within"] is False]
    print(f"{len(figures)} figures, {len(outside)} outside their limits; {len(failed)} benchmarks failed")
    return 1 if failed or outside else 0


if __name__ == "__main__":
    sys.exit(main())
