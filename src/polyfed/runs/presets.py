"""The presets that come with polyfed: their names and texts."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from importlib import resources
from typing import Any

import yaml

from polyfed.core.errors import ConfigError, nearest

BASES = "bases/"
"""Before the names of what presets extend and nobody runs."""


def presets() -> dict[str, str]:
    return {name: str(parsed(text).get("description", "")) for name, text in _preset_texts().items()}


def preset_names() -> tuple[str, ...]:
    return tuple(_preset_texts())


def parsed(text: str) -> Any:
    """What a YAML text says; by the parser in C where there is one, and once, since presets are many."""
    return deepcopy(_parsed(text))


@cache
def _parsed(text: str) -> Any:
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def preset_text(name: str) -> str:
    """A preset as YAML, with its comments: what one copies to start an experiment of one's own.

    Or what several presets extend, data without a method, which is none itself: see ``preset_bases``.

    Raises:
        ConfigError: there is no such preset.
    """
    texts = _preset_texts()
    if name in preset_bases():
        return _preset_texts(BASES)[name]
    if name not in texts:
        raise ConfigError(f"no preset '{name}'; {nearest(name, texts)}")
    return texts[name]


def preset_bases() -> tuple[str, ...]:
    return tuple(_preset_texts(BASES))


@cache
def _preset_texts(folder: str = "") -> dict[str, str]:
    files = resources.files("polyfed.presets").joinpath(folder).iterdir()
    texts = {
        folder + file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8")
        for file in files
        if file.name.endswith(".yaml")
    }
    return dict(sorted(texts.items()))
