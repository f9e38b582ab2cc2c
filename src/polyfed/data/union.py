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
    first, origins = sets[0], _Origins(sets)
    targets = [name for name in first.targets if all(name in each.targets for each in sets)]
    return Samples(
        inputs={name: origins.inputs(name) for name in first.modalities},
        rows={name: origins.rows(name) for name in first.modalities},
        items=origins.items(),
        targets={name: torch.cat([each.targets[name] for each in sets]) for name in targets},
        ids=origins.ids(),
        classes={name: classes for name, classes in first.classes.items() if name in targets},
        matches=origins.matches(),
    )


class _Origins:
    """The data sets that several sets of samples are taken from, and how those are numbered apart."""

    def __init__(self, sets: Sequence[Samples]) -> None:
        self._sets = sets
        by_origin = {_origin(each): each for each in sets}
        numbers = {origin: number for number, origin in enumerate(by_origin)}
        self._distinct = list(by_origin.values())
        self._number_of = [numbers[_origin(each)] for each in sets]

    def inputs(self, modality: str) -> Inputs:
        """Of all data sets, one after the other."""
        chain = tuple(each.inputs[modality] for each in self._distinct)
        return chain[0] if len(chain) == 1 else _Chained(chain)

    def ids(self) -> Sequence[str]:
        """Of the items of all data sets; the very list where there is one, which tells that it is the same data set."""
        if len(self._distinct) == 1:
            return self._distinct[0].ids
        return [name for each in self._distinct for name in each.ids]

    def rows(self, modality: str) -> Int64[Tensor, " n"]:
        """Each sample's row in the chained inputs."""
        return self._apart(
            [each.rows[modality] for each in self._sets], [len(each.inputs[modality]) for each in self._distinct]
        )

    def items(self) -> Int64[Tensor, " n"]:
        """Each sample's item among those of all data sets."""
        return self._apart([each.items for each in self._sets], [len(each.ids) for each in self._distinct])

    def matches(self) -> Int64[Tensor, " n"]:
        """Equal for right answers to each other, which samples of different data sets never are."""
        sizes = [0] * len(self._distinct)
        for each, number in zip(self._sets, self._number_of, strict=True):
            sizes[number] = max(sizes[number], int(each.matches.max()) + 1 if each.matches.numel() else 0)
        return self._apart([each.matches for each in self._sets], sizes)

    def _apart(self, values: Sequence[Tensor], sizes: Sequence[int]) -> Int64[Tensor, " n"]:
        """Numbers of each set, after those of the data sets before its own, which have so many."""
        starts = _starts(sizes)
        return torch.cat([each + starts[number] for each, number in zip(values, self._number_of, strict=True)])


def _origin(samples: Samples) -> tuple[int, ...]:
    """Equal for samples of one data set, opened through the same views."""
    return (id(samples.ids), *(id(load) for load in samples.inputs.values()))


def _starts(sizes: Iterable[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


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
