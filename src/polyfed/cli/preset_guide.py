"""Presets for people who choose one: which belong together, what each needs, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polyfed.runs.config_files import COST, FAMILY, read_config
from polyfed.runs.presets import parsed, preset_names, preset_text

_FROM_FOLDERS = ("parquet", "mimic_cxr")
_WEIGHTS = ("backbone", "folders", "vectors", "weights", "pretrained")


@dataclass(frozen=True)
class PresetFacts:
    """One preset.

    Attributes:
        name: to run it by.
        description: in a line.
        root: the preset that it extends, at the far end, or what it says that its family is.
        data: folders below the data folder that it reads.
        weights: whether it needs a folder of pretrained weights.
        download: whether it takes data from the hub.
        cost: roughly what it takes.
    """

    name: str
    description: str
    root: str
    data: tuple[str, ...]
    weights: bool
    download: bool
    cost: str

    @property
    def needs(self) -> str:
        """What must be there, in words."""
        parts = ["data: " + ", ".join(self.data)] if self.data else []
        parts += ["data from the hub"] if self.download else []
        return "; ".join(parts + (["weights"] if self.weights else [])) or "nothing"


def preset_groups() -> dict[str, list[PresetFacts]]:
    """Root -> its presets, itself first; the roots that need least come first."""
    groups: dict[str, list[PresetFacts]] = {}
    for facts in map(preset_facts, preset_names()):
        groups.setdefault(facts.root, []).append(facts)
    for members in groups.values():
        members.sort(key=lambda facts: (facts.name != facts.root, facts.name))
    return dict(sorted(groups.items(), key=lambda item: (_effort(item[1][0]), item[0])))


def preset_facts(name: str) -> PresetFacts:
    """What there is to know of a preset before it is run.

    Raises:
        ConfigError: there is no such preset.
    """
    chain = list(_chain(name))
    content = read_config(name)
    sources = [entry for entry in content["data"]["sources"].values() if isinstance(entry, Mapping)]
    used = [*sources, *(source["of"] for source in sources if isinstance(source.get("of"), Mapping))]
    folders = [str(source["path"]) for source in used if source.get("name") in _FROM_FOLDERS]
    return PresetFacts(
        name=name,
        description=str(content.get("description", "")),
        root=next((str(entry[FAMILY]) for _, entry in chain if FAMILY in entry), chain[-1][0]),
        data=tuple(sorted(set(folders))),
        weights=any(key in _WEIGHTS and bool(value) for key, value in _leaves(content)),
        download=any(source.get("name") == "hub" for source in used),
        cost=next((str(entry[COST]) for _, entry in chain if COST in entry), ""),
    )


def _chain(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A preset and those that it extends, nearest first."""
    content = parsed(preset_text(name))
    yield name, content
    if "extends" in content:
        yield from _chain(str(content["extends"]))


def _leaves(content: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield str(key), value
            yield from _leaves(value)
    elif isinstance(content, list):
        for entry in content:
            yield from _leaves(entry)


def _effort(facts: PresetFacts) -> tuple[bool, bool, bool]:
    return facts.cost == "GPUs", bool(facts.data or facts.download), facts.weights
