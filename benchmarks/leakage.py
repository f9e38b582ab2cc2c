"""Leakage of FedAvg's runs by protection, on generated data: the table of docs/explanation/what-leaves-a-site.md.

    python benchmarks/leakage.py                       # all cells and seeds, some minutes on one core
    python benchmarks/leakage.py --seeds 0

Clients have few samples and train on them for long, so that models without protection are overfitted: attacks that find
nothing there would be too weak to report.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import federations
import harness

import polyfed
from polyfed import open_run
from polyfed.core.device import cpu_threads
from polyfed.lab.analysis.leakage import Leakage, Simulated, run_leakage
from polyfed.runs.experiment import Experiment

Settings = dict[str, Any]

CLIENTS, ITEMS, TESTS = 4, 60, 400
WORDS = {"name": "tokens", "length": 24, "tokenizer": {"name": "hashing", "size": 1000}}
TEXT = {"name": "bag", "width": 32, "view": WORDS}
ADAM = {"optimizer": {"kind": "adam", "lr": 0.02}, "batch_size": 16}
TOPIC = {"name": "classification", "target": "topic"}
SCENES = {"name": "scenes", "validation": 8, "test": TESTS, "size": 16, "difficulty": 1.0}
TEXTS = SCENES | {"columns": {"text": "text"}, "targets": {"topic": "topic"}}


def federation(seed: int) -> Settings:
    """FedAvg without protection."""
    group = {"count": CLIENTS, "model": {"dim": 32, "encoders": {"text": TEXT}}, "task": TOPIC}
    sources = {"texts": TEXTS | {"train": CLIENTS * ITEMS}}
    content = federations.classification(sources, group, ADAM, {"name": "fedavg", "local_epochs": 10})
    content["run"] |= {"rounds": 3, "eval_every": 1, "threads": 1, "seed": seed, "evaluate_clients": False}
    return content


PROTECTIONS: Mapping[str, Settings] = {
    "none": {},
    "noise on replies": {"privacy": {"reply": {"noise_multiplier": 2.0, "weights": 1.0}}},
    "secure sum": {"aggregation": {"secure": "pairwise_masks"}},
    "DP-SGD": {"privacy": {"samples": {"noise_multiplier": 1.0, "clip": 1.0}}},
}
"""Protection -> what it changes."""


def measured(settings: Settings, folder: Path, plan: Leakage) -> dict[str, Any]:
    """Findings of the attacks on a run."""
    with cpu_threads(1):
        polyfed.run(Experiment.parse(settings), folder, quiet=True)
    return run_leakage(Simulated(open_run(folder)), plan).figures


COLUMNS = {"by a score: AUC": 0.5, "recognised": 0.01, "final model: AUC": 0.5}
"""Figure -> what a guess has."""


def row(leakage: dict[str, Any]) -> dict[str, float]:
    """Figures of replies, and of final models; means over clients."""
    members = leakage["findings"]
    final = [one for one in members if one["on"].startswith("final")]
    sent = [one for one in members if not one["on"].startswith("final")]
    values = _mean(sent, "auc"), _mean(sent, "tpr_at_1_percent"), _mean(final, "auc")
    return {name: value for name, value in zip(COLUMNS, values, strict=True) if value is not None}


def _mean(findings: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [one[name]["value"] for one in findings]
    return fmean(values) if values else None


def main() -> None:
    """Run all cells; means over seeds, and ranges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    for protection, changes in PROTECTIONS.items():
        cells: dict[str, list[float]] = {name: [] for name in COLUMNS}
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                leakage = measured(federation(seed) | changes, Path(folder) / "run", Leakage(clients=2))
            for name, value in row(leakage).items():
                cells[name].append(value)
        for name, values in cells.items():
            if values:
                title, guess = f"leakage of FedAvg, protection {protection}: {name}", f"a guess, {COLUMNS[name]:g}"
                harness.report(title, ratio=fmean(values), against=guess, lowest=min(values), highest=max(values))


if __name__ == "__main__":
    main()
