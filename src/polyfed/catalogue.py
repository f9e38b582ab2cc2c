"""What there is to choose from: presets, and the components of each family with their settings."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import yaml

from polyfed.declarations import ClassDeclaration, class_declarations, components
from polyfed.errors import ConfigError, nearest
from polyfed.extras import how_to_install, is_installed

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
    """Names and one-line descriptions of a kind, with what must be installed for those whose extra is not there.

    Raises:
        ConfigError: there is no such kind.
    """
    if kind == PRESETS:
        return presets()
    return {name: _summary(declared) + _to_install(declared) for name, declared in _declared(kind).items()}


def settings_of(kind: str, name: str) -> list[Setting]:
    """Settings of a component.

    Raises:
        ConfigError: there is no such kind or name.
    """
    known = _declared(kind)
    if name not in known:
        raise ConfigError(f"there is no '{name}' among {kind}; {nearest(name, known)}")
    module, family, _ = _FAMILIES[kind]
    component: type[Component] = getattr(importlib.import_module(module), family).named(name)
    return [_setting(field, info) for field, info in component.model_fields.items()]


def presets() -> dict[str, str]:
    """Names and descriptions of the presets that come with polyfed."""
    return {name: str(parsed(text).get("description", "")) for name, text in _preset_texts().items()}


def preset_names() -> tuple[str, ...]:
    """Names of the presets."""
    return tuple(_preset_texts())


def parsed(text: str) -> Any:
    """What a YAML text says; by the parser in C where there is one, since presets are many."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe


def preset_text(name: str) -> str:
    """A preset as YAML, with its comments: what one copies to start an experiment of one's own.

    Raises:
        ConfigError: there is no such preset.
    """
    texts = _preset_texts()
    if name not in texts:
        raise ConfigError(f"no preset '{name}'; {nearest(name, texts)}")
    return texts[name]


@cache
def _preset_texts() -> dict[str, str]:
    files = (entry for entry in resources.files("polyfed.presets").iterdir() if entry.name.endswith(".yaml"))
    texts = {file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8") for file in files}
    return dict(sorted(texts.items()))


def _declared(kind: str) -> dict[str, ClassDeclaration]:
    """Components of a kind by name, unimported: torch takes seconds."""
    if kind not in _FAMILIES:
        raise ConfigError(f"cannot list '{kind}'; {nearest(kind, kinds())}")
    module, family, _ = _FAMILIES[kind]
    return components(class_declarations(module)[family].texts["home"], (module, family))


def _summary(declared: ClassDeclaration) -> str:
    """First sentence of the docstring, on one line."""
    paragraph = declared.documentation.strip().split("\n\n")[0]
    sentence = re.split(r"\.\s(?=[A-Z])", " ".join(paragraph.split()))[0]
    return sentence.rstrip(".").replace("``", "`")


def _to_install(declared: ClassDeclaration) -> str:
    extra = declared.texts.get("pip_extra", "")
    return f" (not installed: {how_to_install(extra)})" if extra and not is_installed(extra) else ""


def _setting(name: str, info: FieldInfo) -> Setting:
    default = "required" if info.is_required() else _shown(info.get_default(call_default_factory=True))
    return Setting(name, default, info.description or "")


def _shown(value: Any) -> str:
    plain = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
