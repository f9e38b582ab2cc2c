"""Synthetic run folders in the formats that a run writes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from polyfed.runs.folder import RunFolder

GROUPS = {"image": 4, "text": 3, "paired": 2}
CLASSES = [f"class {c}" for c in range(12)]


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_measured(folder: Path, metrics: dict[str, dict[str, float]], *rounds: int, kind: str = "test") -> None:
    """The log of a run in which each participant has these metrics in each round (by default in round 1)."""
    lines = [
        {"round": number, "participant": participant, "kind": kind, "metrics": values}
        for number in rounds or (1,)
        for participant, values in metrics.items()
    ]
    write_lines(folder / "metrics.jsonl", lines)


def redigested(folder: Path) -> Path:
    """The run folder, with the digest of its configuration made to fit."""
    noted = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(noted | {"config": RunFolder(folder).config_digest()}))
    return folder


def client_ids() -> dict[str, str]:
    return {f"{group}-{number}": group for group, size in GROUPS.items() for number in range(size)}


def server_metrics(value: float) -> dict[str, float]:
    metrics = {"r1_sum": 2 * value}
    for source, target, positives in (("image", "text", 5.0), ("text", "image", 1.0)):
        name = f"{source}_to_{target}"
        metrics |= {f"{name}_r@{k}": min(100.0, value * k**0.5) for k in (1, 5, 10)}
        metrics |= {f"{name}_positives_per_query": positives}
    return metrics | {"gallery_image": 100.0, "gallery_text": 500.0, "folds": 1.0}


def write_run(folder: Path, *, rounds: int = 12, seed: int = 0, gain: float = 30.0, **config: object) -> Path:
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    clients = client_ids()
    metrics, ledger, timing = [], [], []
    for number in range(1, rounds + 1):
        value = gain * (1 - 0.8**number) + draw.uniform(-1, 1)
        test = {"round": number, "participant": "server", "kind": "test", "metrics": server_metrics(value)}
        metrics += [test, test | {"kind": "validation", "metrics": server_metrics(value + 1)}]
        for client, group in clients.items():
            if draw.random() < 0.7:
                accuracy = gain + draw.uniform(-9, 9) + number
                found = {"r1_sum" if group == "paired" else "accuracy": accuracy, "loss": 2.0 / number, "n": 50.0}
                metrics.append({"round": number, "participant": client, "kind": "test", "metrics": found})
            for direction, size in (("down", 3_000_000), ("up", 1_500_000)):
                line = {"round": number, "client": client, "direction": direction, "step": "fit"}
                ledger.append(line | {"bundle": "z", "kind": "representations", "dtype": "float32", "bytes": size})
                ledger.append(line | {"bundle": "framing", "kind": "framing", "dtype": "", "bytes": 100})
        timing.append({"round": number, "seconds": 10 + draw.random()})
    event = {"participant": "text-1", "kind": "event", "event": "client_excluded", "reason": "loss is not finite"}
    metrics += [event | {"round": 3}, event | {"round": 5, "reason": "no answer in 60 s"}]
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "ledger.jsonl", ledger)
    write_lines(folder / "timing.jsonl", timing)
    (folder / "partition.json").write_text(json.dumps({c: holding(g, draw) for c, g in clients.items()}))
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": {"seed": seed, "rounds": rounds}, **config}))
    write_weights(folder, rounds, seed)
    return folder


def holding(group: str, draw: random.Random) -> dict:
    labels = {name: int(draw.expovariate(0.02)) + 1 for name in CLASSES if draw.random() < 0.6}
    samples = sum(labels.values()) or 1
    several = group == "paired"
    return {
        "group": group,
        "source": "scenes",
        "split": "train",
        "items": samples,
        "samples": samples * 5 if several else samples,
        "labels": None if several else labels,
        "index": list(range(samples)),
    }


def write_weights(folder: Path, rounds: int, seed: int) -> None:
    path = folder / "arrays" / "weights.image"
    path.mkdir(parents=True)
    owners = [client for client, group in client_ids().items() if group != "text"]
    generator = torch.Generator().manual_seed(seed)
    for number in (1, rounds // 2, rounds):
        cohort = [owners[i] for i in sorted(torch.randperm(len(owners), generator=generator)[:4].tolist())]
        drift = torch.linspace(-1, 1, len(cohort))[:, None] * torch.linspace(-2, 2, 1000)
        values = (torch.randn(len(cohort), 1000, generator=generator) * 0.5 + drift).softmax(0)
        save_file({"values": values}, path / f"round-{number:04d}.safetensors", {"clients": json.dumps(cohort)})
