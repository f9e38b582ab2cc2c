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
        """What shorter inputs are filled up with."""
        return int(getattr(self.parts[0], "pad", 0))


def _padded(part: Tensor, length: int, pad: int) -> Tensor:
    """The second dimension filled up to a length."""
    missing = length - part.shape[1]
    filling = part.new_full((len(part), missing, *part.shape[2:]), pad)
    return torch.cat([part, filling], dim=1) if missing else part


def union(sets: Sequence[Samples]) -> Samples:
    """All samples of several sets with the same modalities, in their order.

    Sets of one data set keep its numbers of items and right answers, so that equal ones stay equal; those of different
    data sets are numbered apart. Targets are those that all have.

    Raises:
        ConfigError: modalities differ, or what a target's classes are called.
    """
    first = sets[0]
    for other in sets[1:]:
        _require_alike(first, other)
    # samples of one data set, opened through the same views, share these very objects
    keys = [(id(part.ids), *(id(load) for load in part.inputs.values())) for part in sets]
    data_sets = dict(zip(keys, sets, strict=True))
    matches = dict.fromkeys(data_sets, 0)
    for key, part in zip(keys, sets, strict=True):
        matches[key] = max(matches[key], int(part.matches.max()) + 1 if part.matches.numel() else 0)

    def apart(values: Iterable[Tensor], sizes: Iterable[int]) -> Int64[Tensor, " n"]:
        """Numbers of each set, after those of the data sets before its own, which have so many."""
        starts = dict(zip(data_sets, _starts(sizes), strict=True))
        return torch.cat([numbers + starts[key] for key, numbers in zip(keys, values, strict=True)])

    chains = {name: [part.inputs[name] for part in data_sets.values()] for name in first.modalities}
    targets = [name for name in first.targets if all(name in part.targets for part in sets)]
    ids = [part.ids for part in data_sets.values()]
    return Samples(
        inputs={name: chain[0] if len(chain) == 1 else _Chained(tuple(chain)) for name, chain in chains.items()},
        rows={name: apart((part.rows[name] for part in sets), map(len, chain)) for name, chain in chains.items()},
        items=apart((part.items for part in sets), map(len, ids)),
        targets={name: torch.cat([part.targets[name] for part in sets]) for name in targets},
        # the very list of a single data set tells that it is the same data set
        ids=ids[0] if len(ids) == 1 else [name for names in ids for name in names],
        classes={name: classes for name, classes in first.classes.items() if name in targets},
        matches=apart((part.matches for part in sets), matches.values()),
    )


def _starts(sizes: Iterable[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _require_alike(left: Samples, right: Samples) -> None:
    if set(left.modalities) != set(right.modalities):
        raise ConfigError(
            f"samples of {list(left.modalities)} and of {list(right.modalities)} make no union; choose sets with "
            "the same modalities"
        )
    for name in left.classes.keys() & right.classes.keys():
        if tuple(left.classes[name]) != tuple(right.classes[name]):
            raise ConfigError(f"the classes of '{name}' differ, so the samples make no union")
