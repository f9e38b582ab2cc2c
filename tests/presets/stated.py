"""What a preset that claims the values of a paper or of a released code must say, and how that is compared with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

Entries = dict[str, tuple[Any, str]]
"""Pattern of paths of settings -> the value, and where it comes from."""


@dataclass(frozen=True)
class Table:
    """The values that a preset must have, each by its path, where ``*`` stands for anything.

    Attributes:
        sourced: values of a source, with the place where it has them.
        chosen: values that cannot be the source's, or that no source has, with the words of the preset's description
            that say so.
        idle: settings that have no effect in this preset, and therefore are at their defaults, with the reason.
    """

    sourced: Entries
    chosen: Entries
    idle: dict[str, str] = field(default_factory=dict)

    def changed(
        self, sourced: Entries | None = None, chosen: Entries | None = None, idle: dict[str, str] | None = None
    ) -> Table:
        """The same with other or further entries; one of a pattern that another part had moves over."""
        new, own, silent = sourced or {}, chosen or {}, idle or {}
        return Table(
            {key: entry for key, entry in self.sourced.items() if key not in own | silent} | new,
            {key: entry for key, entry in self.chosen.items() if key not in new | silent} | own,
            {key: reason for key, reason in self.idle.items() if key not in new | own} | silent,
        )

    def without(self, *patterns: str) -> Table:
        """The same without settings that the preset does not have."""
        return Table(
            *(
                {key: part[key] for key in part if key not in patterns}
                for part in (self.sourced, self.chosen, self.idle)
            )
        )

    @property
    def values(self) -> dict[str, Any]:
        """Pattern -> value, of those that have one."""
        return {pattern: value for pattern, (value, _) in (self.sourced | self.chosen).items()}

    @property
    def patterns(self) -> set[str]:
        """All patterns."""
        return {*self.sourced, *self.chosen, *self.idle}


HYPERPARAMETERS = (
    *("public", "server", "clients", "algorithm"),
    *("run.rounds", "run.seed", "run.sampling", "run.precision"),
)
"""Sections all of whose settings are compared; the rest of ``run`` changes no result, and ``data`` cannot be equal."""

DATA = ("*.source", "*.split", "*.test_split", "*.validation_split")
"""Settings that say which data; no values of a method."""

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

MECHANICS: dict[str, Any] = {
    # torch's defaults, which no source changes
    "*.optimizer.betas": [0.9, 0.999],
    "*.optimizer.eps": 1e-8,
    "*.schedule.warmup": 0,
    # torchvision's defaults, and the boxes of random erasing as published
    "*.view.resampling": "bicubic",
    "*.augment.rotate.resampling": "nearest",
    "*.augment.erase.scale": [0.02, 0.33],
    "*.augment.erase.ratio": [0.3, 3.3],
    # settings that polyfed has and no source knows: off
    "public.without": {},
    "public.unpaired": {},
    "public.gallery": 0,
    "public.reserve": 0,
    "server.type": "",
    "clients.*.type": "",
    "clients.*.also": None,
    "*.test_items": None,
    "*.missing": None,
    "clients.*.test": "all",
    "*.partition.of": [],
    "*.partition.together": None,
    "*.task.between": ["image", "text"],
    "*.task.fold_seed": None,
    "*.task.cutoffs": [1, 5, 10],
    "*.task.in_batch": None,
    "*.task.target": "label",
    "*.task.classes": None,
    "*.task.modality": None,
    "*.task.names": None,
    "*.task.imputation.name": "drop",
    "*.task.imputation.dropout": 0.0,
    "*.task.given": "all",
    "*.tokenizer.lowercase": True,
    "*.tokenizer.min_count": 2,
    "*.view.augment.shift": None,
    "*.model*.aligner": None,
    "*.encoders.image.norm": "batch",
    "*.encoders.*.tower": "whole",
    "*.encoders.*.adapter": None,
    "*.encoders.*.projection": "new",
    "*.encoders.*.precision": "fp32",
    "*.encoders.*.checkpointing": False,
    "algorithm.distiller.training": None,
    "algorithm.distiller.temperature": None,
    "algorithm.teacher.diagnostic_samples": 1024,
    "algorithm.teacher.groups": None,
    "algorithm.teacher.alignment": None,
}
"""Settings that are no value of any of these methods: they must be at these defaults."""


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
    """The settings of a resolved configuration that act, without those that say which data."""
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
    kind = every.get(f"{section}.{decides}")
    conditional = {key for keys in acting.values() for key in keys}
    return kind not in acting or name not in conditional or name in acting[kind]


def default_of(settings: Any, path: str) -> Any:
    """The default of the setting at a path below ``settings``."""
    *parents, name = path.split(".")
    for key in parents:
        if isinstance(settings, Mapping):
            settings = settings[key]
        else:
            settings = settings[int(key)] if key.isdigit() else getattr(settings, key)
    return type(settings).model_fields[name].get_default(call_default_factory=True)


def entry_for(path: str, entries: Iterable[str]) -> str | None:
    """The pattern that a path falls under: itself, or the longest that matches."""
    found = [pattern for pattern in entries if fnmatchcase(path, pattern)]
    return max(found, key=lambda pattern: (pattern == path, len(pattern)), default=None)
