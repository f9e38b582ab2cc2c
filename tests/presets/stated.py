"""Values that presets must have: tables read from the YAML files of this folder, and settings to compare with them.

A layer of ``creamfl.yaml``, ``fedafd.yaml``, ``fedaid.yaml`` or ``fedcola.yaml`` maps patterns of setting paths, where
``*`` stands for anything, to expectations: ``sourced`` values with their source as a comment; ``chosen`` values, which
no source has, with the words of the preset's description that declare them; ``idle`` settings, which have no effect in
the preset and stay at their defaults; ``gone`` patterns of earlier layers, whose settings the preset lacks. ``presets``
and ``rows`` (of studies at the scale of the paper) list the layers of each table; an entry of a later layer replaces
that of an earlier one. ``mechanics.yaml`` has the defaults of settings that are not a value of any of these methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import yaml


def content(name: str) -> Any:
    """Content of a YAML file of this folder."""
    return yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text())


class Entry(NamedTuple):
    """Expectation of a table: its part, the value, and the words that declare a chosen one."""

    part: str
    value: Any = None
    phrase: str = ""


Table = dict[str, Entry]
"""Pattern -> expectation."""

FILES = [content(name) for name in ("creamfl", "fedafd", "fedaid", "fedcola")]
LAYERS = {name: layer for file in FILES for name, layer in file["layers"].items()}
MECHANICS: dict[str, Any] = content("mechanics")

HYPERPARAMETERS = (
    *("public", "server", "clients", "algorithm"),
    *("run.rounds", "run.seed", "run.sampling", "run.precision"),
)
"""Sections all of whose settings are compared; the other settings of ``run`` change no result, and ``data`` differs."""

DATA = ("*.source", "*.split", "*.test_split", "*.validation_split")
"""Settings that select data, which are not values of a method."""

INERT: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "schedule": (
        "kind",
        {
            "constant": (),
            "cosine": ("t_max", "minimum"),
            "steps": ("milestones", "drop"),
            "exponential": ("decay", "unit"),
        },
    ),
    "optimizer": (
        "kind",
        {"sgd": ("momentum",), "adam": ("betas", "eps"), "adamw": ("betas", "eps"), "adamp": ("betas", "eps")},
    ),
    "task": (
        "objective",
        {"soft_contrastive": ("shift", "scale", "reduction"), "info_nce": ("temperature", "learn_temperature")},
    ),
}
"""Frame -> the setting that decides, and which others act under each of its values."""


def table(names: Iterable[str]) -> Table:
    """Expectations of these layers together."""
    entries: Table = {}
    for layer in map(LAYERS.__getitem__, names):
        entries |= {pattern: Entry("sourced", value) for pattern, value in layer.get("sourced", {}).items()}
        entries |= {pattern: Entry("chosen", *entry) for pattern, entry in layer.get("chosen", {}).items()}
        entries |= {pattern: Entry("idle") for pattern in layer.get("idle", ())}
        for pattern in layer.get("gone", ()):
            del entries[pattern]
    return entries


def tables(section: str) -> dict[str, Table]:
    """Preset, or ``study: row``, -> its table."""
    return {name: table(layers) for file in FILES for name, layers in file[section].items()}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and values of the settings of a resolved configuration."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for position, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{position}")
    else:
        yield path, value


def hyperparameters(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a resolved configuration that act, without those that select data."""
    every = dict(leaves(resolved))
    return {
        path: value
        for path, value in every.items()
        if path.startswith(HYPERPARAMETERS)
        and not any(fnmatchcase(path, pattern) for pattern in DATA)
        and _acts(path, every)
    }


def _acts(path: str, every: Mapping[str, Any]) -> bool:
    section, _, name = path.rpartition(".")
    decides, acting = INERT.get(section.rpartition(".")[2], ("", {}))
    choice = every.get(f"{section}.{decides}")
    conditional = {key for keys in acting.values() for key in keys}
    return choice not in acting or name not in conditional or name in acting[choice]


def default_of(settings: Any, path: str) -> Any:
    """Default of the setting at a path below ``settings``."""
    *parents, name = path.split(".")
    for key in parents:
        if isinstance(settings, Mapping):
            settings = settings[key]
        else:
            settings = settings[int(key)] if key.isdigit() else getattr(settings, key)
    return type(settings).model_fields[name].get_default(call_default_factory=True)


def pattern_of(path: str, patterns: Iterable[str]) -> str | None:
    """Pattern that applies to a path: itself, or the longest that matches."""
    matching = [pattern for pattern in patterns if fnmatchcase(path, pattern)]
    return max(matching, key=lambda pattern: (pattern == path, len(pattern)), default=None)
