"""The smallest complete experiment, of which the fixtures and the test of the wheel make theirs."""

from __future__ import annotations

from typing import Any


def tiny_experiment() -> dict[str, Any]:
    pixels = {"name": "pixels", "size": 16}
    image = {"name": "resnet", "widths": [8, 8], "depths": [1, 1], "block": "basic", "view": pixels}
    text = {"name": "bag", "width": 8, "view": {"name": "tokens", "length": 16}}
    both = {"dim": 8, "encoders": {"image": image, "text": text}}
    training = {"optimizer": {"kind": "adam", "lr": 0.01}, "batch_size": 16}
    return {
        "name": "tiny",
        "data": {
            "sources": {
                "scenes": {"name": "scenes", "train": 48, "validation": 12, "test": 12, "size": 16},
                "private": {"name": "scenes", "train": 24, "validation": 8, "test": 8, "size": 16, "seed": 1},
            }
        },
        "public": {"source": "scenes", "items": 16},
        "server": {"model": both, "task": "retrieval", "source": "scenes", "training": training},
        "clients": {
            "paired": {
                "count": 2,
                "source": "scenes",
                "model": both,
                "task": "retrieval",
                "training": training,
            },
            "image": {
                "count": 1,
                "source": "private",
                "model": {"dim": 8, "encoders": {"image": image}},
                "task": "classification",
                "training": training,
            },
        },
        "algorithm": {"name": "fedavg", "local_epochs": 1},
        "run": {"rounds": 2, "threads": 1, "device": "cpu", "plots": False},
    }
