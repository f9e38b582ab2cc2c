"""Federations whose participants exchange class scores, for tests of methods that have both forms."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from by_hand import transformers

Config = dict[str, Any]


def classifying(tiny: Config) -> Config:
    """``tiny`` with one classification everywhere, and a public set that has its classes."""
    config = copy.deepcopy(tiny)
    for participant in (config["server"], *config["clients"].values()):
        participant["task"] = "classification"
    return config


def unlabelled(tiny: Config) -> Config:
    """The same with a public set that lacks these classes."""
    config = classifying(tiny)
    config["data"]["sources"]["scenes"] |= {"targets": {"topic": "topic"}, "columns": {"image": "image"}}
    del config["clients"]["paired"]
    image = config["clients"]["image"]
    config["server"] = {key: image[key] for key in ("model", "task", "source", "training")}
    config["clients"]["image"]["count"] = 2
    return config


def topics(**algorithm: Any) -> Config:
    """A server and two clients that tell the topic of a text, one of six, by a bag of words: learnt in a second."""
    config = transformers()
    view = {"name": "tokens", "length": 24, "tokenizer": {"name": "hashing", "size": 400}}
    training = {"optimizer": {"kind": "adam", "lr": 0.02}, "batch_size": 32}
    texts = config["data"]["sources"]["texts"] | {"difficulty": 0.0}
    config["data"]["sources"] = {
        "texts": texts | {"train": 600, "test": 200},
        "public": texts | {"train": 300, "test": 200, "seed": 5},
    }
    client = config["clients"]["text"] | {"training": training}
    client["model"] = {"dim": 32, "encoders": {"text": {"name": "bag", "width": 32, "view": view}}}
    server = {key: client[key] for key in ("model", "task", "training")} | {"source": "public"}
    config |= {"server": server, "clients": {"text": client}, "public": {"source": "public"}}
    return config | {"algorithm": {"local_epochs": 3, "exchange": "scores"} | algorithm}


def unit(*shape: int, seed: int = 0) -> Tensor:
    """Random rows of unit norm."""
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def divergence(student: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """KL(softmax(teacher / tau) || softmax(student / tau)) of each row, in float64."""
    p, q = (torch.exp(rows.double() / tau) for rows in (teacher, student))
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    return (p * (p / q).log()).sum(1)
