"""``polyfed list``: presets and what they need, and components with their settings and values."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import typer

from polyfed.cli.options import AsJson
from polyfed.core.declarations import ClassDeclaration, class_declarations, components
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.extras import how_to_install, is_installed
from polyfed.runs.config_files import COST, FAMILY, parsed, preset_names, preset_text, presets, read_config

if TYPE_CHECKING:
    from polyfed.core.settings import Settings

PRESETS = "presets"
SETTINGS = "settings"
FAMILIES = {
    "methods": ("polyfed.algorithms.algorithm", "Algorithm", "algorithm"),
    "models": ("polyfed.models.encoder", "Encoder", "encoders of a modality"),
    "adapters": ("polyfed.models.adapters.adapter", "Adapter", "what is trained of a frozen network"),
    "data": ("polyfed.data.source", "Source", "sources of data"),
    "views": ("polyfed.data.view", "View", "what encoders receive"),
    "tokenizers": ("polyfed.data.tokenizers", "Tokenizer", "texts as token ids"),
    "imputations": ("polyfed.tasks.imputations", "Imputation", "what stands for a modality that a sample lacks"),
    "partitions": ("polyfed.partitions.partition", "Partition", "how items are dealt out among clients"),
    "tasks": ("polyfed.tasks.task", "Task", "what a participant is trained for"),
    "weightings": ("polyfed.aggregation.weighting", "Weighting", "weights over clients, sample by sample"),
    "rules": ("polyfed.privacy.rules", "RobustRule", "what a minority of false clients cannot move far"),
    "sums": ("polyfed.privacy.secure_sum", "SecureSum", "how replies are added up unseen"),
    "attacks": ("polyfed.federation.attack", "Attack", "what simulated attackers do"),
    "paces": ("polyfed.federation.paces", "Pace", "when the server takes a step"),
    "times": ("polyfed.federation.paces", "ResponseTimes", "how long simulated clients take"),
    "staleness": ("polyfed.federation.paces", "Staleness", "what late replies count for"),
    "server-optimizers": ("polyfed.optim.servers", "ServerOptimizer", "of global models"),
    "analyses": ("polyfed.lab.analysis.analysis", "Analysis", "questions to runs"),
    "probes": ("polyfed.lab.downstream.probe", "Probe", "tests of frozen encoders"),
    "engines": ("polyfed.engines.engine", "EngineSettings", "where client steps execute"),
    "sinks": ("polyfed.runs.sink", "Sink", "trackers that follow a run"),
}
_SECTIONS = {
    "experiment": ("polyfed.runs.experiment", "Experiment"),
    "sites.SITE": ("polyfed.runs.sites", "NamedSite"),
    "common": ("polyfed.runs.sites", "CommonSettings"),
    "data": ("polyfed.federation.settings", "DataSettings"),
    "public": ("polyfed.federation.settings", "PublicSettings"),
    "server": ("polyfed.federation.settings", "ServerSettings"),
    "clients.GROUP": ("polyfed.federation.settings", "GroupSettings"),
    "clients.GROUP.missing": ("polyfed.federation.settings", "MissingSettings"),
    "model": ("polyfed.models.model", "ModelSettings"),
    "model.aligner": ("polyfed.models.aligner", "AlignerSettings"),
    "training": ("polyfed.federation.settings", "TrainingSettings"),
    "training.optimizer": ("polyfed.optim.settings", "OptimizerSettings"),
    "training.schedule": ("polyfed.optim.settings", "Schedule"),
    "aggregation": ("polyfed.privacy.settings", "AggregationSettings"),
    "aggregation.clip": ("polyfed.privacy.rules", "Clipping"),
    "privacy": ("polyfed.privacy.settings", "PrivacySettings"),
    "privacy.reply": ("polyfed.privacy.settings", "ReplyProtection"),
    "privacy.samples": ("polyfed.privacy.settings", "SampleProtection"),
    "privacy.budget": ("polyfed.privacy.settings", "Budget"),
    "run": ("polyfed.runs.settings", "RunSettings"),
    "run.sampling": ("polyfed.federation.sampling", "SamplingSettings"),
    "run.exchange": ("polyfed.runs.settings", "ExchangeSettings"),
    "run.exchange.phases.STEP": ("polyfed.runs.settings", "PhaseSettings"),
    "run.exchange.transport": ("polyfed.wire.transport", "Transport"),
    "run.exchange.limits": ("polyfed.wire.limits", "Limits"),
    "run.output": ("polyfed.runs.settings", "OutputSettings"),
    "twin": ("polyfed.runs.twins", "TwinSettings"),
    "initial": ("polyfed.runs.settings", "InitialModels"),
}
_FROM_FOLDERS = ("parquet", "mimic_cxr")
_WEIGHTS = ("backbone", "folders", "vectors", "weights", "pretrained")
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_PLAIN = {bool: "true | false", int: "whole number", float: "number", str: "text", Path: "path"}
_LISTS = (list, set, frozenset, Sequence, tuple)


@dataclass(frozen=True)
class Setting:
    """One setting of a component or a section."""

    name: str  # key in a configuration, with a dot for each section above it
    default: str  # as YAML would have it, or ``required``
    description: str
    allowed: str  # which values it takes


def kinds() -> dict[str, str]:
    """Families that can be listed, with descriptions."""
    components = {family: words for family, (_, _, words) in FAMILIES.items()}
    return {PRESETS: "named experiments", SETTINGS: "sections of a configuration"} | components


def entries(family: str) -> dict[str, str]:
    """Names and one-line descriptions of a family, with the command that installs a missing extra.

    Raises:
        ConfigError: the family does not exist.
    """
    if family == PRESETS:
        return presets()
    return {name: _summary(declaration) for name, declaration in _declared(family).items()}


def settings_of(family: str, name: str) -> list[Setting]:
    """Settings of a component, or of a section of a configuration.

    Raises:
        ConfigError: the family or name does not exist.
    """
    choices = _declared(family)
    if name not in choices:
        raise ConfigError(f"'{name}' is not among {family}; {nearest(name, choices)}")
    owner = getattr(importlib.import_module(choices[name].module), choices[name].name)
    return list(_fields(owner, sections=family != SETTINGS))


def _fields(owner: type[Settings], *, sections: bool, path: str = "", own: Settings | None = None) -> Iterator[Setting]:
    """Settings of a class with its defaults, or those of an instance; of ``sections``, each of theirs with its path."""
    from polyfed.core.settings import shown

    for field, info in owner.model_fields.items():
        default = getattr(own, field) if own else info.get_default(call_default_factory=True)
        text = "required" if own is None and info.is_required() else shown(default)
        yield Setting(path + field, text, info.description or "", _in_words(info.annotation, info.metadata))
        if sections and _is_section(default):
            yield from _fields(type(default), sections=True, path=f"{path}{field}.", own=default)


def _is_section(value: Any) -> TypeGuard[Settings]:
    """True if a value is a section whose settings belong to its holder; training has a list of its own."""
    from polyfed.core.settings import Settings, is_component
    from polyfed.federation.settings import TrainingSettings

    return isinstance(value, Settings) and not is_component(type(value)) and not isinstance(value, TrainingSettings)


def _declared(family: str) -> dict[str, ClassDeclaration]:
    """Components of a family, or sections, by name, without importing them: torch takes seconds."""
    if family == SETTINGS:
        return {name: class_declarations(module)[section] for name, (module, section) in _SECTIONS.items()}
    if family not in FAMILIES:
        raise ConfigError(f"cannot list '{family}'; {nearest(family, kinds())}")
    module, base, _ = FAMILIES[family]
    return components(class_declarations(module)[base].texts["home"], (module, base))


def _summary(declared: ClassDeclaration) -> str:
    """First sentence of the docstring, on one line, and the command that installs a missing extra."""
    paragraph = declared.documentation.strip().split("\n\n")[0]
    sentence = re.split(r"\.\s(?=[A-Z])", " ".join(paragraph.split()))[0].rstrip(".").replace("``", "`")
    extra = declared.texts.get("pip_extra", "")
    return sentence + (f" (not installed: {how_to_install(extra)})" if extra and not is_installed(extra) else "")


# ---- values of a setting, in words, read from its type and bounds


def _in_words(allowed: Any, metadata: Sequence[Any] = ()) -> str:
    from polyfed.core.settings import Settings, is_component  # pydantic, which names alone do not need

    if get_origin(allowed) is Annotated:
        allowed, *more = get_args(allowed)
        return _in_words(allowed, [*metadata, *more])
    if allowed is type(None):
        return "null"
    if allowed in _PLAIN:
        return _PLAIN[allowed] + _bounds(metadata)
    if is_component(allowed):
        names = allowed.declared()
        is_choice = allowed.family() is allowed or names
        return " | ".join([*names, "import path of a class"]) if is_choice else allowed.component_name()
    if isinstance(allowed, type) and issubclass(allowed, Settings):
        return f"section of {', '.join(allowed.model_fields)}"
    return _generic_in_words(allowed, metadata)


def _generic_in_words(allowed: Any, metadata: Sequence[Any]) -> str:
    origin, arguments = get_origin(allowed), get_args(allowed)
    if origin is Literal:
        return " | ".join(map(_yaml, arguments))
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(_in_words(part, metadata) for part in arguments))
    if origin is tuple and Ellipsis not in arguments:
        return f"[{', '.join(map(_in_words, arguments))}]"
    parts = [f"({words})" if " | " in words else words for words in map(_in_words, arguments)]
    if origin in _LISTS:
        return f"list of {parts[0]}{_bounds(metadata)}"
    return f"mapping of {parts[0]} to {parts[1]}" if origin in (dict, Mapping) else "any"


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bounds(metadata: Sequence[Any]) -> str:
    bounds = [
        f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}"
        for item in metadata
        for name, sign in _SIGNS.items()
        if (bound := getattr(item, name, None)) is not None
    ]
    is_filled = any(getattr(item, "min_length", None) for item in metadata)
    return (f" {' and '.join(bounds)}" if bounds else "") + (", not empty" if is_filled else "")


# ---- presets: which belong together, what each needs, and what it costs


@dataclass(frozen=True)
class PresetFacts:
    """Facts of a preset for the choice of one."""

    name: str
    description: str
    root: str  # the preset that it extends, at the far end, or its family
    data: tuple[str, ...]  # folders below the data folder that it reads
    weights: bool  # it needs a folder of pretrained weights
    download: bool  # it takes data from the hub
    cost: str  # roughly

    @property
    def needs(self) -> str:
        """Requirements in words."""
        own = f"data: {', '.join(self.data)}"
        parts = {own: self.data, "data from the hub": self.download, "weights": self.weights}
        return "; ".join(words for words, needed in parts.items() if needed) or "nothing"

    @property
    def effort(self) -> tuple[bool, bool, bool]:
        """Sorts before others if it needs less."""
        return self.cost == "GPUs", bool(self.data or self.download), self.weights


def preset_groups() -> dict[str, list[PresetFacts]]:
    """Root -> its presets, itself first; the roots that need least come first."""
    groups: dict[str, list[PresetFacts]] = {}
    for facts in sorted(map(preset_facts, preset_names()), key=lambda facts: (facts.name != facts.root, facts.name)):
        groups.setdefault(facts.root, []).append(facts)
    return dict(sorted(groups.items(), key=lambda item: (item[1][0].effort, item[0])))


def preset_facts(name: str) -> PresetFacts:
    """Facts of a preset by its name.

    Raises:
        ConfigError: the preset does not exist.
    """
    root, own = _inherited(name)
    content = read_config(name)
    sources = [entry for entry in content["data"]["sources"].values() if isinstance(entry, Mapping)]
    used = [*sources, *(source["of"] for source in sources if isinstance(source.get("of"), Mapping))]
    return PresetFacts(
        name=name,
        description=str(content.get("description", "")),
        root=str(own.get(FAMILY, root)),
        data=tuple(sorted({str(source["path"]) for source in used if source.get("name") in _FROM_FOLDERS})),
        # an algorithm's weights are those over clients
        weights=any(key in _WEIGHTS and bool(value) for key, value in _leaves(content | {"algorithm": None})),
        download=any(source.get("name") == "hub" for source in used),
        cost=str(own.get(COST, "")),
    )


def _inherited(name: str) -> tuple[str, Mapping[str, Any]]:
    """The preset that one extends, at the far end, and the top level of all on the way; the nearest counts."""
    content = parsed(preset_text(name))
    if "extends" not in content:
        return name, content
    root, inherited = _inherited(str(content["extends"]))
    return root, {**inherited, **content}


def _leaves(content: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values at every level."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        yield str(key), value
        yield from _leaves(value)
    for entry in content if isinstance(content, list) else ():
        yield from _leaves(entry)


# ---- the command


def list_command(
    family: Annotated[str, typer.Argument(help="presets, settings, methods, models, data, ...")] = "",
    name: Annotated[str, typer.Argument(help="one of them, to see its settings")] = "",
    as_json: AsJson = False,
) -> None:
    """Show presets, methods, models, data and their settings.

    Examples: polyfed list; polyfed list presets; polyfed list presets scenes-demo; polyfed list models resnet
    """
    if as_json:
        typer.echo(json.dumps(_content(family, name), indent=1))
        return
    if not family:
        lines: Iterable[str] = _overview()
    elif family == PRESETS:
        lines = preset_text(name).splitlines() if name else _all_presets()
    else:
        lines = _settings(family, name) if name else _rows(entries(family).items())
    for line in lines:
        typer.echo(line)


def _content(family: str, name: str) -> Any:
    """The answer as plain values."""
    if not family:
        return kinds()
    if family == PRESETS:
        members = [facts for group in preset_groups().values() for facts in group]
        return asdict(preset_facts(name)) if name else [asdict(facts) for facts in members]
    return [asdict(setting) for setting in settings_of(family, name)] if name else entries(family)


def _overview() -> Iterator[str]:
    """One screen: families of presets with what they need, and the names of everything else."""
    groups = preset_groups()
    yield f"presets: {sum(map(len, groups.values()))} named experiments, in {len(groups)} families"
    yield from _rows({f"  {root}": _in_short(members) for root, members in groups.items()}.items())
    width = max(40, shutil.get_terminal_size().columns)
    for family, meaning in kinds().items():
        if family != PRESETS:
            text = f"{family}: {meaning}: {', '.join(entries(family))}"
            yield from textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)
    yield "more: polyfed list presets; polyfed list presets scenes-demo; polyfed list models; ... models resnet"


def _in_short(members: list[PresetFacts]) -> str:
    variants = len(members) - 1
    others = f"; {variants} variant{'s' if variants > 1 else ''}" if variants else ""
    return f"needs {members[0].needs}; {members[0].cost}{others}"


def _all_presets() -> Iterator[str]:
    """A family after the other: what it needs in its heading, what differs behind its members."""
    for name, members in preset_groups().items():
        yield f"{name}: {_in_short(members)}"
        rows, root = {}, members[0]
        for facts in members:
            differing = [facts.needs] * (facts.needs != root.needs) + [facts.cost] * (facts.cost != root.cost)
            more = "; ".join(filter(None, differing))
            rows[f"  {facts.name}"] = facts.description + (f" [{more}]" if more else "")
        yield from _rows(rows.items())


def _settings(family: str, name: str) -> Iterator[str]:
    """YAML with the defaults, and behind each its meaning and its values."""
    rows = [] if family == SETTINGS else [(f"name: {name}", "# defaults")]
    settings = settings_of(family, name)
    sections = {setting.name.rpartition(".")[0] for setting in settings}
    for setting in settings:
        above, _, key = setting.name.rpartition(".")
        indent = "  " * (above.count(".") + 1) if above else ""
        value = "" if setting.name in sections else f" {setting.default}"
        meaning = f"{setting.description}: " if setting.description else ""
        rows.append((f"{indent}{key}:{value}", f"# {meaning}{setting.allowed}"))
    return _rows(rows)


def _rows(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Two columns, one row a line whatever the width of the terminal, so that grep and less work."""
    rows = list(rows)
    width = max((len(first) for first, _ in rows if len(first) < 40), default=0)
    for first, second in rows:
        yield f"{first.ljust(width)}  {second}"
