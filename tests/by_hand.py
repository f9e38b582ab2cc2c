"""Local training written out as a plain loop, and small transformer federations, for tests of methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyfed.core.randomness import isolated
from polyfed.data.samples import Batch
from polyfed.federation.client import Client
from polyfed.models.model import Model
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from sessions import woken

Config = dict[str, Any]
UNBOUND = {"update": None, "refuse": None, "size": None}
"""Of three clients and a few batches, an honest one moves one tensor or other far more than usual."""
Weights = Mapping[str, Tensor]
RATE = 0.001


def plain_sgd(config: Config, batch_size: int = 12) -> Config:
    """The same federation with plain SGD everywhere, which ``plain_training`` does."""
    training = {"optimizer": {"kind": "sgd", "lr": RATE, "momentum": 0.0, "clip": None}, "batch_size": batch_size}
    for group in config["clients"].values():
        group["training"] = training
    return config


def transformers(**algorithm: Any) -> Config:
    """One image, two text and two paired clients with exchangeable blocks, on scenes, without a public set."""
    image = {"name": "blocks", "size": "nano", "depth": 1, "patch": 8, "drop_path": 0.0}
    image["view"] = {"name": "pixels", "size": 16}
    tokens = {"name": "tokens", "length": 24, "tokenizer": {"name": "hashing", "size": 1000}}
    text = {"name": "blocks", "size": "nano", "depth": 1, "drop_path": 0.0, "view": tokens}
    without = {"final_norm": False}
    training = {"optimizer": {"kind": "adamw", "lr": 0.001}, "batch_size": 16}
    paired = {"dim": 96, "final_norm": True, "encoders": {"image": image | without, "text": text | without}}
    retrieval = {"name": "retrieval", "objective": "info_nce", "mask_siblings": True}
    topics = {"columns": {"text": "text"}, "targets": {"topic": "topic"}}
    sets = {"train": 24, "validation": 6, "test": 6, "size": 16}
    return {
        "name": "transformers",
        "data": {
            "sources": {
                "scenes": {"name": "scenes", **sets},
                "pictures": {"name": "scenes", **sets, "seed": 1, "columns": {"image": "image"}},
                "texts": {"name": "scenes", **sets, "seed": 2, **topics},
            }
        },
        "server": {"model": paired, "task": retrieval, "source": "scenes", "training": training},
        "clients": {
            "image": group(1, "pictures", {"image": image}, training),
            "text": group(2, "texts", {"text": text}, training, target="topic"),
            "paired": {"count": 2, "source": "scenes", "model": paired, "task": retrieval, "training": training},
        },
        "algorithm": _trained({"name": "fedavg"} | algorithm),
        "run": {"rounds": 2, "threads": 1, "device": "cpu", "plots": False},
    }


def _trained(algorithm: Config) -> Config:
    return algorithm if algorithm.get("local_steps") else {"local_epochs": 1} | algorithm


def in_steps(algorithm: Config, steps: int) -> Config:
    """Settings of a method whose clients train for so many batches, not for epochs."""
    return {key: value for key, value in algorithm.items() if key != "local_epochs"} | {"local_steps": steps}


def group(count: int, source: str, encoders: Config, training: Config, target: str = "label") -> Config:
    """Clients that classify."""
    model, task = {"dim": 96, "encoders": encoders}, {"name": "classification", "target": target}
    return {"count": count, "source": source, "model": model, "task": task, "training": training}


def three_kinds(**algorithm: Any) -> Config:
    """One image, one text and two paired clients on tiny scenes, a server that retrieves, and public pairs."""
    view = {"name": "pixels", "size": 16}
    image = {"name": "resnet", "widths": [8, 8], "depths": [1, 1], "block": "basic", "view": view}
    text = {"name": "bag", "width": 8, "view": {"name": "tokens", "length": 16}}
    training = {"optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.0, "clip": None}, "batch_size": 12}
    retrieval = {"name": "retrieval", "objective": "info_nce", "temperature": 0.5}
    paired = {"model": {"dim": 8, "encoders": {"image": image, "text": text}}, "task": retrieval, "training": training}
    own = {"name": "scenes", "train": 24, "validation": 8, "test": 12, "size": 16}
    pairs = {"train": 16, "columns": {"image": "image", "text": "captions"}, "targets": {"label": "label"}}
    topic = {"columns": {"text": "text"}, "targets": {"topic": "topic"}}
    clients = {
        "image": group(1, "pictures", {"image": image}, training),
        "text": group(1, "texts", {"text": text}, training, target="topic"),
        "paired": paired | {"count": 2, "source": "scenes"},
    }
    clients["image"]["model"]["dim"] = clients["text"]["model"]["dim"] = 8
    return {
        "name": "three-kinds",
        "data": {
            "sources": {
                "scenes": own | pairs,
                "pictures": own | {"seed": 1, "columns": {"image": "image"}},
                "texts": own | {"seed": 2} | topic,
            }
        },
        "public": {"source": "scenes", "items": 8, "per_item": 2},
        "server": paired | {"source": "scenes"},
        "clients": clients,
        "algorithm": _trained(algorithm),
        "run": {"rounds": 2, "threads": 1, "device": "cpu", "plots": False},
    }


def aligned(**algorithm: Any) -> Config:
    """Three paired clients whose encoders have align modules, and a server that shows their model, on tiny scenes."""
    view = {"name": "pixels", "size": 16}
    image = {"name": "resnet", "widths": [8, 8], "depths": [1, 1], "block": "basic", "view": view}
    tokens = {"name": "tokens", "length": 16, "tokenizer": {"name": "hashing", "size": 200}}
    text = {"name": "bag", "width": 8, "view": tokens}
    model = {"dim": 8, "aligner": {"hidden": 16}, "encoders": {"image": image, "text": text}}
    task = {"name": "retrieval", "objective": "info_nce", "learn_temperature": False, "mask_siblings": True}
    participant = {"source": "scenes", "model": model, "task": task}
    training = {"optimizer": {"kind": "adamw", "lr": 0.01}, "batch_size": 12}
    columns = {"image": "image", "text": "captions"}
    scenes = {"name": "scenes", "train": 18, "validation": 8, "test": 12, "size": 16, "columns": columns}
    return {
        "name": "aligned",
        "data": {"sources": {"scenes": scenes}},
        "server": participant,
        "clients": {"hospital": participant | {"count": 3, "training": training}},
        "algorithm": {"name": "fedaid"} | algorithm,
        "run": {"rounds": 2, "threads": 1, "device": "cpu", "plots": False, "bounds": UNBOUND},
    }


def one_classification(config: Config) -> Config:
    """``three_kinds`` whose clients and server all tell the same classes, which public samples have too."""
    task = {"name": "classification", "target": "label", "classes": 18}
    config["data"]["sources"]["texts"]["targets"] = {"label": "label"}
    clients = {name: participant | {"task": task} for name, participant in config["clients"].items()}
    return config | {"clients": clients, "server": config["server"] | {"task": task}}


def play(session: Session, first: int, last: int) -> Session:
    """Rounds ``first`` to ``last`` of a prepared session, drawing what a run would draw."""
    for number in range(first, last + 1):
        session.server.begin(number)
        cohort = session.cohort(number, Ledger())
        with isolated(session.experiment.run.seed, number, "server"):
            session.experiment.algorithm.round(session.server, cohort)
    return session


def as_left(session: Session, client: str) -> Client:
    """A client after its last step."""
    return woken(session, client, (99, 0), after=session.cohorts.accepted[client])


def outcome(session: Session) -> dict[str, dict[str, Tensor]]:
    """The models of the server and of all clients that took part."""
    found = {}
    for name in session.cohorts.accepted:  # one at a time: clients of one architecture share a live model
        found |= copies({name: as_left(session, name).model.state_dict()})
    return found | (copies({"server": session.server.model.state_dict()}) if session.server.has_model else {})


def topics(**algorithm: Any) -> Config:
    """Two clients that tell the topic of a text, one of six, by a bag of words: learnt in a second."""
    config = transformers(local_epochs=3, **algorithm)
    texts = config["clients"]["text"]
    view = {"name": "tokens", "length": 24, "tokenizer": {"name": "hashing", "size": 400}}
    texts["model"] = {"dim": 32, "encoders": {"text": {"name": "bag", "width": 32, "view": view}}}
    texts["training"] = {"optimizer": {"kind": "adam", "lr": 0.02}, "batch_size": 32}
    config["data"]["sources"]["texts"] |= {"train": 600, "test": 200, "difficulty": 0.0}
    del config["server"]
    return config | {"clients": {"text": texts}}


def assert_learns_topics(session: Session, rounds: int = 6) -> None:
    """From near chance to twice as good, on texts that no client trains on; fails if a method does not train."""
    algorithm, server, accuracies = session.experiment.algorithm, session.server, []
    for number in range(1, rounds + 1):
        server.begin(number)
        cohort = session.cohort(number, Ledger())
        accuracies.append(algorithm.evaluate_clients(server, cohort)["text-0"]["accuracy"])
        algorithm.round(server, cohort)
    chance = 100 / 6
    assert accuracies[0] < 1.5 * chance
    assert accuracies[-1] > 2 * chance


def copies(models: Mapping[str, Weights]) -> dict[str, dict[str, Tensor]]:
    """Global models as they are now."""
    return {kind: {name: value.clone() for name, value in model.items()} for kind, model in models.items()}


def plain_training(
    session: Session,
    client_id: str,
    start: Weights,
    *,
    epochs: int = 1,
    extra: Callable[[Model, Batch], Tensor | float] = lambda model, batch: 0.0,
    correct: Callable[[str, Tensor], Tensor] = lambda name, gradient: gradient,
    step: str = "fit",
) -> dict[str, Tensor]:
    """What a client of ``plain_sgd`` sends in round 1: w <- w - lr x gradient of (task loss + extra), batch by batch.

    Args:
        session: prepared.
        client_id: of the client.
        start: the weights that it receives.
        epochs: passes.
        extra: a further loss of a batch.
        correct: gives the gradient to use, of a named parameter.
        step: name of the client step, for what it draws.
    """
    member = session.federation.members[client_id]
    model = session.federation.client_model(member)
    model.load_state_dict(dict(start))
    model.train()
    client = woken(session, client_id)
    with isolated(0, 1, client_id, step, 0):  # dropout draws as the step's does
        for epoch in range(epochs):
            for batch in client.batches(session.federation.train(member), f"task-{epoch}"):
                head = model.heads[member.head] if member.head in model.heads else None
                model.zero_grad()
                (member.settings.task.loss(model, head, batch) + extra(model, batch)).backward()
                _descend(model, correct)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def _descend(model: Model, correct: Callable[[str, Tensor], Tensor]) -> None:
    for name, value in model.named_parameters():
        if value.grad is not None:
            value -= RATE * correct(name, value.grad)


def assert_mean(
    found: Weights, trained: Mapping[str, Weights], shares: Mapping[str, float], tolerance: float = 1e-6
) -> None:
    """``found`` is the mean of the clients' floating tensors, weighted by ``shares``."""
    total = sum(shares[client] for client in trained)
    for name, value in found.items():
        if value.is_floating_point():
            mean = sum(shares[client] / total * weights[name].double() for client, weights in trained.items())
            assert torch.allclose(value.double(), mean, atol=tolerance), name
