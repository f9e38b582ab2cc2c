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
        parts = {
            f"data: {', '.join(self.data)}": self.data,
            "data from the hub": self.download,
            "weights": self.weights,
        }
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
    """What there is to know of a preset before it is run.

    Raises:
        ConfigError: there is no such preset.
    """
    chain = [(name, parsed(preset_text(name)))]  # it and those that it extends, nearest first
    while "extends" in chain[-1][1]:
        parent = str(chain[-1][1]["extends"])
        chain.append((parent, parsed(preset_text(parent))))
    nearest: dict[str, Any] = {}
    for _, entry in reversed(chain):
        nearest |= entry
    content = read_config(name)
    sources = [entry for entry in content["data"]["sources"].values() if isinstance(entry, Mapping)]
    used = [*sources, *(source["of"] for source in sources if isinstance(source.get("of"), Mapping))]
    return PresetFacts(
        name=name,
        description=str(content.get("description", "")),
        root=str(nearest.get(FAMILY, chain[-1][0])),
        data=tuple(sorted({str(source["path"]) for source in used if source.get("name") in _FROM_FOLDERS})),
        weights=any(key in _WEIGHTS and bool(value) for key, value in _leaves(content)),
        download=any(source.get("name") == "hub" for source in used),
        cost=str(nearest.get(COST, "")),
    )


def _leaves(content: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values at every level."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        yield str(key), value
        yield from _leaves(value)
    for entry in content if isinstance(content, list) else ():
        yield from _leaves(entry)
