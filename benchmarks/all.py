"""All benchmarks with a limit or a rival, then one table of their figures, and a record.

    python benchmarks/all.py                  # all but the GPU's, many at quick sizes: about half an hour
    python benchmarks/all.py --plan short     # memory by clients, averaging, recalls: three minutes
    python benchmarks/all.py --plan deployed  # a deployment at all sizes, its memory, and twenty kills
    python benchmarks/all.py --plan gpu       # a GPU against the CPU and plain PyTorch; one line where there is none
    python benchmarks/all.py --plan clients   # cost and memory of 10 to 10,000 clients: a quarter of an hour
    python benchmarks/all.py --plan rivals    # pfl-research and Flower, in environments that are made the first time

Each benchmark is a process of its own; its figures and their limits are the lines of ``harness.report``. A failure or a
missing requirement is a line of the table, and the others go on. Exit status 1 if one fails, or a figure lies outside
its limit. ``--record FILE`` keeps the figures, in place of those that the file has of the same benchmarks; `make pages`
makes the tables of docs/reference/speed.md from it.

In no plan: the most repetitions of its benchmarks, and ``bits.py``, which compares two commits.
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
        *("losses", "weights --quick", "evaluation --quick", "aggregation --quick", "memory", "engine --quick"),
        *("gates", "secure_sum --quick --samples 2000", "engines --quick", "kills --kills 4", "leakage --seeds 0"),
        *("verdicts --studies 300", "peers --rivals pfl_research flower --rounds 4"),
    ),
    "short": ("memory --only 500k --clients 300", "aggregation --quick", "evaluation --quick"),
    "gpu": ("gpu",),
    "clients": ("peers --rivals --clients 10 100 1000 10000 --rounds 2 --repeats 1",),
    "rivals": ("peers --rivals pfl_research flower",),
    "deployed": ("engines --engines deployment", "engines --memory --sizes 100MB", "kills --kills 20"),
}
"""Plan -> benchmarks with their arguments."""

VERDICTS = {True: "within", False: "OUTSIDE", None: "no limit"}


class Outcome(NamedTuple):
    """Result of a benchmark: its figures, its time, a requirement that it lacks, and the error that ended it."""

    benchmark: str
    figures: list[dict[str, Any]]
    seconds: float
    lacks: str | None
    error: str | None


def run(benchmark: str) -> Outcome:
    """Run a benchmark, and show its lines as they come."""
    began, lines = time.monotonic(), []
    name, *arguments = benchmark.split()
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    lines.append(json.loads(line))
                    lacks = lines[-1].get("lacks")
                    line = f"not measured: lacks {lacks}\n" if lacks else line
                print(f"{name}: {line}", end="", flush=True)
        errors.seek(0)
        messages = errors.read().strip().splitlines()
    error = None if lines else "no figures"
    if process.returncode != 0:
        error = messages[-1] if messages else f"exit status {process.returncode}"
    lacks = next((line["lacks"] for line in lines if "lacks" in line), None)
    return Outcome(benchmark, [line for line in lines if "ratio" in line], time.monotonic() - began, lacks, error)


def limit(figure: Mapping[str, Any]) -> str:
    """Limit of a figure, with its sign."""
    sign = "<=" if figure["better"] == "smaller" else ">="
    return "" if figure["limit"] is None else f"{sign} {figure['limit']:g}"


def table(outcomes: Sequence[Outcome]) -> str:
    """All figures with their limits, and the time of each benchmark."""
    rows = [("figure", "measured", "limit", "", "against")]
    for outcome in outcomes:
        rows += [
            (f["name"], f"{f['ratio']:g} {f['unit']}".strip(), limit(f), VERDICTS[f["within"]], f["against"])
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
    facts = {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()}
    facts |= {"python": platform.python_version(), "torch": torch.__version__}
    return facts | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def commit() -> str:
    """The commit that is measured; with a plus where files were changed since."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src", "*.py")
    return git("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")


def record(outcomes: Sequence[Outcome], before: Mapping[str, Any]) -> dict[str, Any]:
    """Content of the record; figures of other benchmarks of a plan are kept from the one ``before``."""
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
    names = {name for plan in PLANS.values() for name in plan} - {each["benchmark"] for each in new}
    others = [each for each in before.get("benchmarks", ()) if each["benchmark"] in names]
    return {"plan": list(PLANS["whole"]), "benchmarks": [*others, *new]}


def main() -> int:
    """Run a plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=PLANS, default="whole")
    parser.add_argument("--record", type=Path, help="file that keeps the figures")
    options = parser.parse_args()
    outcomes = [run(benchmark) for benchmark in PLANS[options.plan]]
    if all(outcome.lacks and not outcome.figures and outcome.error is None for outcome in outcomes):
        return 0  # each has printed its missing requirement
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
