"""A tiny federation in which each shipped method can do all that it does, for tests of what holds for all methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from by_hand import aligned, one_classification, three_kinds, transformers
from polyfed.algorithms.algorithm import Algorithm
from polyfed.algorithms.fedavg import FedAvg
from prototype_federations import classifiers

Config = dict[str, Any]

METHODS = tuple(Algorithm.available())

_SMALL: dict[str, Config] = {
    "fedema": {"predictor_width": 8},
    "fed_mae": {"decoder_depth": 1, "decoder_width": 8, "decoder_heads": 2},
    "fedmkd": {"predictor_width": 8},
    "fedtgp": {"server_epochs": 2},
    "fedaid": {"local_steps": 1, "robust_steps": 1},
    "feddra": {"local_steps": 1, "robust_steps": 1},
}
_TOPICS = {"name": "classification", "target": "topic"}
_ADAM = {"kind": "adam", "lr": 0.01}
_SGD = {"kind": "sgd", "lr": 0.001}  # which feels a factor of the loss
_UNEVEN = {"name": "quantity", "min_size": 3}
_LITTLE: dict[str, Config] = {"resnet": {"widths": [4], "depths": [1]}, "blocks": {"depth": 1}}
_RANDOM: dict[str, Config] = {"pixels": {"augment": {"flip": True}}, "tokens": {"drop": 0.2}}


def federation_for(method: str, *, scores: bool = False, **algorithm: Any) -> Config:
    """A federation that suits a method, with its settings; those that only cost time are small.

    With ``scores`` all participants tell the same classes, as methods need that exchange class scores.
    """
    build = _kind(method)
    config = build(name=method, **_SMALL.get(method, {}) | algorithm)
    if method == "server_only":
        config["algorithm"].pop("local_epochs", None)
    if method == "creamfl_averaged":
        config["public"] = {"source": "scenes", "items": 8, "per_item": 1}
    if method == "centralised":
        config["clients"]["paired"]["count"] = 1
    if build is classifiers:
        config["data"]["sources"]["scenes"] |= {"targets": {"topic": "topic"}}  # six classes, which all clients have
        config["clients"] = {name: group | {"task": _TOPICS} for name, group in config["clients"].items()}
    else:
        _shrink(config, _SGD if build is aligned else _ADAM)
    return one_classification(config) if scores else config


def participants(config: Config) -> Iterator[Config]:
    """Sections of the server and of all groups."""
    yield from config["clients"].values()
    if "server" in config:
        yield config["server"]


def _kind(method: str) -> Any:
    if method in ("fedproto", "fedtgp"):
        return classifiers
    if method in ("fedaid", "feddra"):
        return aligned
    exchanges_weights = issubclass(Algorithm.named(method), FedAvg)
    return transformers if exchanges_weights else three_kinds


def _shrink(config: Config, optimizer: Config) -> None:
    for source in config["data"]["sources"].values():
        source |= {"train": 14, "validation": 4, "test": 4}
    for participant in participants(config):
        participant["training"] = {"optimizer": optimizer, "batch_size": 4}
        for encoder in participant["model"]["encoders"].values():
            encoder |= _LITTLE.get(encoder["name"], {})
            encoder["view"] = encoder["view"] | _RANDOM[encoder["view"]["name"]]
    for group in config["clients"].values():
        if group["count"] > 1:
            group["partition"] = _UNEVEN
