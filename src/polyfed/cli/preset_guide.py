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
    """What there is to know of a preset before it is run."""

    name: str
    description: str
    root: str  # the preset that it extends, at the far end, or what it says that its family is
    data: tuple[str, ...]  # folders below the data folder that it reads
    weights: bool  # it needs a folder of pretrained weights
    download: bool  # it takes data from the hub
    cost: str  # roughly

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
    """Facts of a preset by its name.

    Raises:
        ConfigError: there is no such preset.
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
        weights=any(key in _WEIGHTS and bool(value) for key, value in _leaves(content)),
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
