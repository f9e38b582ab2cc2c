"""Several sets of samples as one: those of several clients, or of several sources that one client holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        # each part is asked once, for all of its rows
        places = [(which == number).nonzero().squeeze(1) for number in range(len(self.parts))]
        loaded = [
            part(rows[place] - start, generator)
            for part, start, place in zip(self.parts, starts, places, strict=True)
            if len(place)
        ]
        if not loaded:
            return self.parts[0](rows, generator)
        longest = max((part.shape[1] for part in loaded if part.dim() > 1), default=0)
        padded = [_padded(part, longest, self.pad) if part.dim() > 1 else part for part in loaded]
        return torch.cat(padded)[torch.cat(places).argsort()]

    @property
    def pad(self) -> int:
        return int(getattr(self.parts[0], "pad", 0))


def _padded(part: Tensor, length: int, pad: int) -> Tensor:
    missing = length - part.shape[1]
    filling = part.new_full((len(part), missing, *part.shape[2:]), pad)
    return torch.cat([part, filling], dim=1) if missing else part


def _together(targets: Sequence[Tensor]) -> Tensor:
    """One after the other; rows of a target filled up with -1 to the longest."""
    longest = max((part.shape[1] for part in targets if part.dim() > 1), default=0)
    return torch.cat([_padded(part, longest, -1) if longest else part for part in targets])


def union(sets: Sequence[Samples]) -> Samples:
    """All samples of several sets with the same modalities, in their order.

    Sets of one data set keep its numbers of items and right answers, so that equal ones stay equal; those of different
    data sets are numbered apart. Targets are those that all have.

    Raises:
        ConfigError: modalities differ, or what a target's classes are called.
    """
    first = sets[0]
    _require_alike(sets)
    origins = _Origins(sets)
    targets = [name for name in first.targets if origins.share(name)]
    return Samples(
        inputs={name: origins.inputs(name) for name in first.modalities},
        rows={name: origins.rows(name) for name in (*first.modalities, *first.lazy)},
        items=origins.items(),
        targets={name: _together([part.targets[name] for part in sets]) for name in targets},
        ids=origins.ids(),
        classes={name: classes for name, classes in first.classes.items() if name in targets},
        matches=origins.matches(),
        lazy={name: origins.inputs(name) for name in first.lazy},
    )


class _Origins:
    """The data sets that several sets of samples are taken from, and how those are numbered apart.

    Attributes:
        sets: all sets.
        distinct: one set of each data set.
    """

    def __init__(self, sets: Sequence[Samples]) -> None:
        self.sets = sets
        # samples of one data set, opened through the same views, share these very objects
        keys = [(id(part.ids), *(id(load) for load in part.inputs.values())) for part in sets]
        by_key = dict(zip(keys, sets, strict=True))
        self.distinct = list(by_key.values())
        self._numbers = [list(by_key).index(key) for key in keys]

    def apart(self, values: Sequence[Tensor], sizes: Sequence[int]) -> Int64[Tensor, " n"]:
        """Numbers of each set, after those of the data sets before its own, which have so many."""
        starts = _starts(sizes)
        return torch.cat([own + starts[number] for own, number in zip(values, self._numbers, strict=True)])

    def share(self, target: str) -> bool:
        return all(target in part.targets for part in self.sets)

    def items(self) -> Int64[Tensor, " n"]:
        return self.apart([part.items for part in self.sets], [len(part.ids) for part in self.distinct])

    def chain(self, column: str) -> tuple[Inputs, ...]:
        return tuple({**part.inputs, **part.lazy}[column] for part in self.distinct)

    def inputs(self, column: str) -> Inputs:
        chain = self.chain(column)
        return chain[0] if len(chain) == 1 else _Chained(chain)

    def rows(self, column: str) -> Int64[Tensor, " n"]:
        own = [part.rows[column] for part in self.sets]
        rows = self.apart(own, [len(inputs) for inputs in self.chain(column)])
        return rows.masked_fill(torch.cat(own) < 0, -1)  # what is lacking stays so

    def ids(self) -> Sequence[str]:
        """Of the items of all data sets; the very list where there is one, which tells that it is the same data set."""
        if len(self.distinct) == 1:
            return self.distinct[0].ids
        return [name for part in self.distinct for name in part.ids]

    def matches(self) -> Int64[Tensor, " n"]:
        """Equal for right answers to each other, which samples of different data sets never are."""
        sizes = [0] * len(self.distinct)
        for part, number in zip(self.sets, self._numbers, strict=True):
            sizes[number] = max(sizes[number], int(part.matches.max()) + 1 if part.matches.numel() else 0)
        return self.apart([part.matches for part in self.sets], sizes)


def _starts(sizes: Iterable[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _require_alike(sets: Sequence[Samples]) -> None:
    for other in sets[1:]:
        _require_same_kind(sets[0], other)


def _require_same_kind(left: Samples, right: Samples) -> None:
    if set(left.modalities) != set(right.modalities):
        raise ConfigError(
            f"samples of {list(left.modalities)} and of {list(right.modalities)} make no union; choose sets with "
            "the same modalities"
        )
    if left.lazy.keys() != right.lazy.keys():
        raise ConfigError(f"samples with masks {list(left.lazy)} and {list(right.lazy)} make no union")
    for name in left.classes.keys() & right.classes.keys():
        if tuple(left.classes[name]) != tuple(right.classes[name]):
            raise ConfigError(f"the classes of '{name}' differ, so the samples make no union")
