"""What runs give away by method and protection, on generated data: the table of docs/explanation/what-leaves-a-site.md.

    python benchmarks/leakage.py                       # all cells and seeds, some minutes on a core
    python benchmarks/leakage.py --methods fedavg --seeds 0

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

import polyfed
from polyfed import open_run
from polyfed.core.device import cpu_threads
from polyfed.lab.analysis.leakage import Leakage, run_leakage
from polyfed.lab.analysis.simulated import Simulated
from polyfed.runs.experiment import Experiment

Settings = dict[str, Any]

CLIENTS, ITEMS, TESTS = 4, 60, 400
WORDS = {"name": "tokens", "length": 24, "tokenizer": {"name": "hashing", "size": 1000}}
TEXT = {"name": "bag", "width": 32, "view": WORDS}
IMAGE = {
    "name": "resnet",
    "widths": [16, 16],
    "depths": [1, 1],
    "block": "basic",
    "view": {"name": "pixels", "size": 16},
}
ADAM = {"optimizer": {"kind": "adam", "lr": 0.02}, "batch_size": 16}
TOPIC = {"name": "classification", "target": "topic"}
MATCHING = {"name": "retrieval", "objective": "info_nce"}
SCENES = {"name": "scenes", "validation": 8, "test": TESTS, "size": 16, "difficulty": 1.0}
TEXTS = SCENES | {"columns": {"text": "text"}, "targets": {"topic": "topic"}}


def federation(method: str, seed: int) -> Settings:
    """A method without protection."""
    return {"fedavg": _weights, "fedmd": _logits, "creamfl": _representations}[method](seed)


def _common(sources: Settings, algorithm: Settings, clients: Settings, seed: int, **more: Any) -> Settings:
    run = {"rounds": 3, "threads": 1, "device": "cpu", "output": {"plots": False}, "seed": seed}
    group = {"count": CLIENTS, **clients}
    return {"name": "leakage", "data": {"sources": sources}, "clients": {"site": group}, "algorithm": algorithm} | {
        "run": run | {"evaluate_clients": False},
        **more,
    }


def _texts() -> Settings:
    model = {"dim": 32, "encoders": {"text": TEXT}}
    return {"source": "texts", "model": model, "task": TOPIC, "training": ADAM}


def _weights(seed: int) -> Settings:
    sources = {"texts": TEXTS | {"train": CLIENTS * ITEMS}}
    return _common(sources, {"name": "fedavg", "local_epochs": 10}, _texts(), seed)


def _logits(seed: int) -> Settings:
    sources = {"texts": TEXTS | {"train": CLIENTS * ITEMS}, "public": TEXTS | {"train": 200, "seed": 5}}
    server = {key: value for key, value in _texts().items() if key != "source"} | {"source": "public"}
    algorithm = {"name": "fedmd", "local_epochs": 10, "public": {"form": "scores"}, "teacher": {"weights": "count"}}
    return _common(sources, algorithm, _texts(), seed, server=server, public={"source": "public"})


def _representations(seed: int) -> Settings:
    pairs = {"columns": {"image": "image", "text": "text"}}
    sources = {
        "pairs": SCENES | pairs | {"train": CLIENTS * ITEMS},
        "public": SCENES | pairs | {"train": 100, "seed": 5},
    }
    both = {"model": {"dim": 16, "encoders": {"image": IMAGE, "text": TEXT}}, "task": MATCHING, "training": ADAM}
    algorithm = {"name": "creamfl", "local_epochs": 10, "teacher": {"weights": "count"}}
    server = both | {"source": "public"}
    return _common(sources, algorithm, both | {"source": "pairs"}, seed, server=server, public={"source": "public"})


KINDS = {"fedavg": "weights", "fedmd": "logits", "creamfl": "representations"}


def protected(method: str) -> Mapping[str, Settings]:
    """Protection -> what it changes; those that a method has."""
    reply = {"noise_multiplier": 2.0, KINDS[method]: {"fedavg": 1.0, "fedmd": 10.0}.get(method, 1.0)}
    cells: dict[str, Settings] = {
        "none": {},
        "noise on replies": {"privacy": {"reply": reply}},
        "secure sum": {"aggregation": {"secure": "pairwise_masks"}},
    }
    if method == "fedavg":
        cells["DP-SGD"] = {"privacy": {"samples": {"noise_multiplier": 1.0, "clip": 1.0}}}
    return cells


def measured(settings: Settings, folder: Path, plan: Leakage) -> dict[str, Any]:
    """A run, attacked."""
    with cpu_threads(1):
        polyfed.run(Experiment.parse(settings), folder, quiet=True)
    return run_leakage(Simulated(open_run(folder)), plan).figures


COLUMNS = (
    "by a score: AUC",
    "told",
    "final model: AUC",
)


def row(leakage: dict[str, Any]) -> dict[str, float]:
    """Figures of what crossed, and of final models; means over clients."""
    members = leakage["findings"]
    final = [one for one in members if one["on"].startswith("final")]
    sent = [one for one in members if not one["on"].startswith("final")]
    values = _mean(sent, "auc"), _mean(sent, "tpr_at_1_percent"), _mean(final, "auc")
    return {name: value for name, value in zip(COLUMNS, values, strict=True) if value is not None}


def _mean(findings: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [one[name]["value"] for one in findings]
    return fmean(values) if values else None


def _cell(values: Sequence[float]) -> str:
    """Mean over seeds, and the range."""
    return f"{fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "-"


def main() -> None:
    """Run all cells and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    print(f"| method | protection | {' | '.join(COLUMNS)} |\n|{' --- |' * (len(COLUMNS) + 2)}")
    for method in options.methods:
        plan = Leakage(clients=2)
        for protection, changes in protected(method).items():
            cells: dict[str, list[float]] = {name: [] for name in COLUMNS}
            for seed in options.seeds:
                with tempfile.TemporaryDirectory() as folder:
                    leakage = measured(federation(method, seed) | changes, Path(folder) / "run", plan)
                for name, value in row(leakage).items():
                    cells[name].append(value)
            shown = " | ".join(_cell(values) for values in cells.values())
            print(f"| {method} ({KINDS[method]}) | {protection} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
