"""A tiny federation in which each shipped method can do all that it does, for tests of what holds for all methods."""

from __future__ import annotations

from typing import Any

from by_hand import aligned, three_kinds, transformers
from polyfed.algorithms.algorithm import Algorithm
from prototype_federations import classifiers

Config = dict[str, Any]

METHODS = tuple(Algorithm.available())

_BLOCKS = ("fedavg", "fediot", "fedcola", "fed_mae")
_SMALL: dict[str, Config] = {
    "fedema": {"predictor_width": 8},
    "fed_mae": {"decoder_depth": 1, "decoder_width": 8, "decoder_heads": 2},
    "fedmkd": {"predictor_width": 8},
    "fedtgp": {"server_epochs": 2},
    "fedaid": {"local_steps": 1, "robust_steps": 1},
    "feddra": {"local_steps": 1, "robust_steps": 1},
}


def federation_for(method: str, **algorithm: Any) -> Config:
    """A federation that suits a method, with its settings; those that only cost time are small."""
    config = _kind(method)(name=method, **_SMALL.get(method, {}) | algorithm)
    if method == "creamfl_averaged":
        config["server"] = config["clients"]["paired"] | {"source": "scenes"}
        del config["server"]["count"]
    if method == "centralised":
        config["clients"]["paired"]["count"] = 1
    if method == "server_only":
        del config["algorithm"]["local_epochs"]
    return _smaller(config)


def _kind(method: str) -> Any:
    if method in _BLOCKS:
        return transformers
    if method in ("fedproto", "fedtgp"):
        return classifiers
    return aligned if method in ("fedaid", "feddra") else three_kinds


def _smaller(config: Config) -> Config:
    for source in config["data"]["sources"].values():
        source |= {"validation": 4, "test": 4}
    config["run"] |= {"rounds": 2}
    return config
