"""What there is to choose from: presets, and the components of each family with their settings."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import yaml

from polyfed.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from polyfed.settings import Component

PRESETS = "presets"

_FAMILIES = {
    "methods": ("polyfed.algorithms.algorithm", "Algorithm", "algorithm"),
    "models": ("polyfed.models.encoder", "Encoder", "encoders of a modality"),
    "data": ("polyfed.data.source", "Source", "sources of data"),
    "views": ("polyfed.data.view", "View", "how a modality is presented to its encoder"),
    "tokenizers": ("polyfed.data.tokenization", "Tokenizer", "how texts become token ids"),
    "partitions": ("polyfed.data.partition", "Partition", "how items are dealt out among clients"),
    "tasks": ("polyfed.tasks.task", "Task", "what a party is trained for"),
    "weightings": ("polyfed.aggregation.weighting", "Weighting", "weights over clients, sample by sample"),
    "server-optimizers": ("polyfed.optim.server", "ServerOptimizer", "how global models follow the averages"),
    "probes": ("polyfed.downstream.probe", "Probe", "tests of frozen encoders"),
    "engines": ("polyfed.engines.engine", "EngineSettings", "where client steps execute"),
    "sinks": ("polyfed.reporting.sink", "Sink", "trackers that follow a run"),
}


@dataclass(frozen=True)
class Setting:
    """One setting of a component: its name, its default as YAML would have it, and what it means."""

    name: str
    default: str
    description: str


def kinds() -> dict[str, str]:
    """What can be listed, with descriptions."""
    return {PRESETS: "named experiments"} | {kind: words for kind, (_, _, words) in _FAMILIES.items()}


def entries(kind: str) -> dict[str, str]:
    """Names and one-line descriptions of a kind.

    Raises:
        ConfigError: there is no such kind.
    """
    if kind == PRESETS:
        return presets()
    return {name: _summary(component) for name, component in _family(kind).available().items()}


def settings_of(kind: str, name: str) -> list[Setting]:
    """Settings of a component.

    Raises:
        ConfigError: there is no such kind or name.
    """
    family = _family(kind).available()
    if name not in family:
        raise ConfigError(f"there is no '{name}' among {kind}; {nearest(name, family)}")
    return [_setting(field, info) for field, info in family[name].model_fields.items()]


def presets() -> dict[str, str]:
    """Names and descriptions of the presets that come with polyfed."""
    return {name: str(yaml.safe_load(text).get("description", "")) for name, text in _preset_texts().items()}


def preset_text(name: str) -> str:
    """A preset as YAML, with its comments: what one copies to start an experiment of one's own.

    Raises:
        ConfigError: there is no such preset.
    """
    texts = _preset_texts()
    if name not in texts:
        raise ConfigError(f"no preset '{name}'; {nearest(name, texts)}")
    return texts[name]


def _preset_texts() -> dict[str, str]:
    files = (entry for entry in resources.files("polyfed.presets").iterdir() if entry.name.endswith(".yaml"))
    texts = {file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8") for file in files}
    return dict(sorted(texts.items()))


def _family(kind: str) -> type[Component]:
    if kind not in _FAMILIES:
        raise ConfigError(f"cannot list '{kind}'; {nearest(kind, kinds())}")
    module, name, _ = _FAMILIES[kind]
    family: type[Component] = getattr(importlib.import_module(module), name)
    return family


def _summary(component: type[Component]) -> str:
    """First sentence of the docstring, on one line."""
    paragraph = (component.__doc__ or "").strip().split("\n\n")[0]
    sentence = re.split(r"\.\s(?=[A-Z])", " ".join(paragraph.split()))[0]
    return sentence.rstrip(".").replace("``", "`")


def _setting(name: str, info: FieldInfo) -> Setting:
    default = "required" if info.is_required() else _shown(info.get_default(call_default_factory=True))
    return Setting(name, default, info.description or "")


def _shown(value: Any) -> str:
    plain = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
