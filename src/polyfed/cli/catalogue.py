"""What there is to choose from: presets, and the components of each family with their settings."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyfed.core.declarations import ClassDeclaration, class_declarations, components
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.extras import how_to_install, is_installed
from polyfed.runs.presets import presets

if TYPE_CHECKING:
    from polyfed.core.settings import Settings

PRESETS = "presets"
SETTINGS = "settings"
_FAMILIES = {
    "methods": ("polyfed.algorithms.algorithm", "Algorithm", "algorithm"),
    "models": ("polyfed.models.encoder", "Encoder", "encoders of a modality"),
    "data": ("polyfed.data.source", "Source", "sources of data"),
    "views": ("polyfed.data.view", "View", "how a modality is presented"),
    "tokenizers": ("polyfed.data.tokenization", "Tokenizer", "how texts become token ids"),
    "partitions": ("polyfed.partitions.partition", "Partition", "how items are dealt out among clients"),
    "tasks": ("polyfed.tasks.task", "Task", "what a participant is trained for"),
    "weightings": ("polyfed.aggregation.weighting", "Weighting", "weights over clients, sample by sample"),
    "rules": ("polyfed.aggregation.robust_rule", "RobustRule", "what a minority of false clients cannot move far"),
    "sums": ("polyfed.aggregation.secure_sum", "SecureSum", "how replies are added up unseen"),
    "attacks": ("polyfed.federation.attack", "Attack", "what simulated attackers do"),
    "server-optimizers": ("polyfed.optim.server", "ServerOptimizer", "how global models follow the averages"),
    "probes": ("polyfed.downstream.probe", "Probe", "tests of frozen encoders"),
    "engines": ("polyfed.engines.engine", "EngineSettings", "where client steps execute"),
    "sinks": ("polyfed.runs.sink", "Sink", "trackers that follow a run"),
}
_SECTIONS = {
    "experiment": ("polyfed.runs.experiment", "Experiment"),
    "data": ("polyfed.federation.settings", "DataSettings"),
    "public": ("polyfed.federation.settings", "PublicSettings"),
    "server": ("polyfed.federation.settings", "ServerSettings"),
    "clients.GROUP": ("polyfed.federation.settings", "GroupSettings"),
    "model": ("polyfed.models.model", "ModelSettings"),
    "training": ("polyfed.federation.settings", "TrainingSettings"),
    "training.optimizer": ("polyfed.optim.settings", "OptimizerSettings"),
    "training.schedule": ("polyfed.optim.settings", "Schedule"),
    "aggregation": ("polyfed.aggregation.robust_rule", "AggregationSettings"),
    "run": ("polyfed.runs.experiment", "RunSettings"),
    "run.sampling": ("polyfed.federation.sampling", "SamplingSettings"),
    "run.phases.STEP": ("polyfed.runs.experiment", "PhaseSettings"),
    "run.transport": ("polyfed.wire.transport", "Transport"),
    "run.limits": ("polyfed.wire.limits", "Limits"),
    "run.bounds": ("polyfed.federation.bounds", "Bounds"),
}


@dataclass(frozen=True)
class Setting:
    """One setting of a component or a section."""

    name: str  # key in a configuration
    default: str  # as YAML would have it, or ``required``
    description: str
    allowed: str  # which values it takes


def kinds() -> dict[str, str]:
    """What can be listed, with descriptions."""
    families = {kind: words for kind, (_, _, words) in _FAMILIES.items()}
    return {PRESETS: "named experiments", SETTINGS: "sections of a configuration"} | families


def entries(kind: str) -> dict[str, str]:
    """Names and one-line descriptions of a kind, with what must be installed for those whose extra is not there.

    Raises:
        ConfigError: there is no such kind.
    """
    if kind == PRESETS:
        return presets()
    if kind == SETTINGS:
        declared = {name: class_declarations(module)[section] for name, (module, section) in _SECTIONS.items()}
    else:
        declared = _declared(kind)
    return {name: _summary(declaration) for name, declaration in declared.items()}


def settings_of(kind: str, name: str) -> list[Setting]:
    """Settings of a component, or of a section of a configuration.

    Raises:
        ConfigError: there is no such kind or name.
    """
    from polyfed.cli.allowed import allowed_values  # pydantic, which names alone do not need
    from polyfed.core.effects import Never, conditions_of, shown

    choices = _SECTIONS if kind == SETTINGS else _declared(kind)
    if name not in choices:
        raise ConfigError(f"there is no '{name}' among {kind}; {nearest(name, choices)}")
    module, attribute = _SECTIONS[name] if kind == SETTINGS else _FAMILIES[kind][:2]
    family = getattr(importlib.import_module(module), attribute)
    owner: type[Settings] = family if kind == SETTINGS else family.named(name)
    settings = []
    for field, info in owner.model_fields.items():
        default = "required" if info.is_required() else shown(info.get_default(call_default_factory=True))
        condition = conditions_of(owner).get(field)
        never = isinstance(condition, Never)
        effect = f"{'without effect:' if never else 'only with'} {condition}" if condition is not None else ""
        description = "; ".join(filter(None, (info.description, effect)))
        settings.append(Setting(field, default, description, allowed_values(info)))
    return settings


def _declared(kind: str) -> dict[str, ClassDeclaration]:
    """Components of a kind by name, unimported: torch takes seconds."""
    if kind not in _FAMILIES:
        raise ConfigError(f"cannot list '{kind}'; {nearest(kind, kinds())}")
    module, family, _ = _FAMILIES[kind]
    return components(class_declarations(module)[family].texts["home"], (module, family))


def _summary(declared: ClassDeclaration) -> str:
    """First sentence of the docstring, on one line, and what must be installed if its extra is not there."""
    paragraph = declared.documentation.strip().split("\n\n")[0]
    sentence = re.split(r"\.\s(?=[A-Z])", " ".join(paragraph.split()))[0].rstrip(".").replace("``", "`")
    extra = declared.texts.get("pip_extra", "")
    return sentence + (f" (not installed: {how_to_install(extra)})" if extra and not is_installed(extra) else "")
