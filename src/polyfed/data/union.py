"""Several sets of samples as one: those of several clients, or of several sources that one client holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.data.samples import Inputs, Samples


@dataclass(frozen=True)
class _Chained:
    """Inputs one after the other, in one numbering of rows."""

    parts: tuple[Inputs, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __call__(self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None) -> Tensor:
        starts = list(_starts(len(part) for part in self.parts))
        which = torch.bucketize(rows, torch.tensor(starts), right=True) - 1
        places = [(which == number).nonzero().squeeze(1) for number in range(len(self.parts))]
        loaded = [
            part(rows[place] - start, generator)
            for part, start, place in zip(self.parts, starts, places, strict=True)
            if len(place)
        ]
        joined = torch.cat(_equally_long(loaded, self.pad)) if loaded else None
        return self.parts[0](rows, generator) if joined is None else joined[torch.cat(places).argsort()]

    @property
    def pad(self) -> int:
        """What shorter inputs are filled up with."""
        return int(getattr(self.parts[0], "pad", 0))


def _equally_long(parts: Sequence[Tensor], pad: int) -> list[Tensor]:
    """The parts with the second dimension, if any, filled up to that of the longest."""
    longest = max((part.shape[1] for part in parts if part.dim() > 1), default=0)
    return [
        part if part.dim() < 2 or part.shape[1] == longest else _filled(part, longest - part.shape[1], pad)
        for part in parts
    ]


def _filled(part: Tensor, missing: int, pad: int) -> Tensor:
    return torch.cat([part, part.new_full((len(part), missing, *part.shape[2:]), pad)], dim=1)


def union(sets: Sequence[Samples]) -> Samples:
    """All samples of several sets with the same modalities, in their order.

    Sets of one data set keep its numbers of items and right answers, so that equal ones stay equal; those of different
    data sets are numbered apart. Targets are those that all have.

    Raises:
        ConfigError: modalities differ, or what a target's classes are called.
    """
    _require_alike(sets)
    origins = {_origin(each): each for each in sets}
    order = {key: number for number, key in enumerate(origins)}
    where = [order[_origin(each)] for each in sets]
    first = sets[0]
    rows = {name: _starts(len(each.inputs[name]) for each in origins.values()) for name in first.modalities}
    items = _starts(len(each.ids) for each in origins.values())
    matches = _starts(_codes(each.matches for each in sets if _origin(each) == key) for key in origins)
    targets = [name for name in first.targets if all(name in each.targets for each in sets)]
    return Samples(
        inputs={name: _chained([each.inputs[name] for each in origins.values()]) for name in first.modalities},
        rows={name: _shifted([each.rows[name] for each in sets], where, starts) for name, starts in rows.items()},
        items=_shifted([each.items for each in sets], where, items),
        targets={name: torch.cat([each.targets[name] for each in sets]) for name in targets},
        ids=first.ids if len(origins) == 1 else [name for each in origins.values() for name in each.ids],
        classes={name: classes for name, classes in first.classes.items() if name in targets},
        matches=_shifted([each.matches for each in sets], where, matches),
    )


def _origin(samples: Samples) -> tuple[int, ...]:
    """Equal for samples of one data set, opened through the same views."""
    return (id(samples.ids), *(id(load) for load in samples.inputs.values()))


def _codes(matches: Iterable[Int64[Tensor, " n"]]) -> int:
    return 1 + max((int(each.max()) for each in matches if each.numel()), default=-1)


def _starts(sizes: Iterable[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _shifted(values: Sequence[Tensor], where: Sequence[int], starts: Sequence[int]) -> Int64[Tensor, " n"]:
    return torch.cat([each + starts[place] for each, place in zip(values, where, strict=True)])


def _chained(parts: Sequence[Inputs]) -> Inputs:
    return parts[0] if len(parts) == 1 else _Chained(tuple(parts))


def _require_alike(sets: Sequence[Samples]) -> None:
    first = sets[0]
    for each in sets[1:]:
        if set(each.modalities) != set(first.modalities):
            raise ConfigError(
                f"samples of {list(first.modalities)} and of {list(each.modalities)} make no union; choose sets with "
                "the same modalities"
            )
        if wrong := _first_difference(first.classes, each.classes):
            raise ConfigError(f"the classes of '{wrong}' differ, so the samples make no union")


def _first_difference(left: Mapping[str, tuple[str, ...]], right: Mapping[str, tuple[str, ...]]) -> str | None:
    return next((name for name in left if name in right and tuple(left[name]) != tuple(right[name])), None)
