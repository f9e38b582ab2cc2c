"""Small federations for tests of methods that exchange prototypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyfed.runs.opened import Run
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from sessions import prepared

Config = dict[str, Any]
SPACE = "label:18x7bd651f0"  # the target, how many classes, and a digest of their names
TRAINING = {"optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.0, "clip": None}, "batch_size": 12}


def classifiers(name: str = "fedproto", **algorithm: Any) -> Config:
    """One client of pictures and two of texts, in one class space, with models of their own; some classes are rare."""
    view = {"name": "pixels", "size": 16}
    image = {"name": "resnet", "widths": [8, 8], "depths": [1, 1], "block": "basic", "view": view}
    tokens = {"name": "tokens", "length": 16, "tokenizer": {"name": "hashing", "size": 200}}
    text = {"name": "bag", "width": 8, "view": tokens}
    common = {"source": "scenes", "task": "classification", "training": TRAINING, "items": 32}
    sets = {"train": 48, "validation": 8, "test": 20, "size": 16, "columns": {"image": "image", "text": "text"}}
    return {
        "name": "classifiers",
        "data": {"sources": {"scenes": {"name": "scenes", **sets}}},
        "clients": {
            "image": common | {"count": 1, "model": {"dim": 8, "encoders": {"image": image}}},
            "text": common | {"count": 2, "model": {"dim": 8, "encoders": {"text": text}}},
        },
        "algorithm": {"name": name, "local_epochs": 1} | algorithm,
        "run": {"rounds": 3, "threads": 1, "device": "cpu", "plots": False},
    }


def with_retrieval(config: Config) -> Config:
    """The same with a client of both modalities, whose task has no classes."""
    text, image = (config["clients"][name]["model"]["encoders"] for name in ("text", "image"))
    paired = {"count": 1, "source": "scenes", "task": "retrieval", "training": TRAINING}
    both = paired | {"model": {"dim": 8, "encoders": image | text}}
    return config | {"clients": config["clients"] | {"paired": both}}


def began(config: Config, folder: Path, rounds: int = 1) -> Session:
    """A session after so many rounds."""
    session = prepared(config, folder)
    for number in range(1, rounds + 1):
        play(session, number)
    return session


def play(session: Session, number: int, ledger: Ledger | None = None) -> None:
    """One round."""
    session.server.begin(number)
    session.experiment.algorithm.round(session.server, session.cohort(number, ledger or Ledger()))


def told(result: Run) -> dict[str, bytes]:
    """All that a run without a server's model leaves; client metrics depend on every bit that was kept."""
    names = ("metrics.jsonl", "ledger.jsonl", "partition.json")
    return {name: (result.folder / name).read_bytes() for name in names}
