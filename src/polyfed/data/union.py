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
        positions = [(which == number).nonzero().squeeze(1) for number in range(len(self.parts))]
        loaded = [
            part(rows[own] - start, generator)
            for part, start, own in zip(self.parts, starts, positions, strict=True)
            if len(own)
        ]
        if not loaded:
            return self.parts[0](rows, generator)
        longest = max((part.shape[1] for part in loaded if part.dim() > 1), default=0)
        padded = [_padded(part, longest, self.pad) if part.dim() > 1 else part for part in loaded]
        return torch.cat(padded)[torch.cat(positions).argsort()]

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
    for other in sets[1:]:
        _require_alike(first, other)
    # samples of one data set, opened through the same views, share these very objects
    keys = [(id(part.ids), *(id(load) for load in part.inputs.values())) for part in sets]
    of_key = dict(zip(keys, sets, strict=True))
    distinct, number = list(of_key.values()), [list(of_key).index(key) for key in keys]  # one set of each data set

    def apart(values: Sequence[Tensor], sizes: Sequence[int]) -> Int64[Tensor, " n"]:
        """Numbers of each set, after those of the data sets before its own, which have so many."""
        starts = _starts(sizes)
        return torch.cat([own + starts[data_set] for own, data_set in zip(values, number, strict=True)])

    chains = {
        name: tuple({**part.inputs, **part.lazy}[name] for part in distinct) for name in (*first.inputs, *first.lazy)
    }
    opened = {name: chain[0] if len(chain) == 1 else _Chained(chain) for name, chain in chains.items()}
    rows = {}
    for name, chain in chains.items():
        own = [part.rows[name] for part in sets]
        # what is lacking stays so
        rows[name] = apart(own, [len(inputs) for inputs in chain]).masked_fill(torch.cat(own) < 0, -1)
    matches = [0] * len(distinct)  # samples of different data sets are never right answers to each other
    for part, data_set in zip(sets, number, strict=True):
        matches[data_set] = max(matches[data_set], int(part.matches.max()) + 1 if part.matches.numel() else 0)
    targets = [name for name in first.targets if all(name in part.targets for part in sets)]
    return Samples(
        inputs={name: opened[name] for name in first.inputs},
        rows=rows,
        items=apart([part.items for part in sets], [len(part.ids) for part in distinct]),
        targets={name: _together([part.targets[name] for part in sets]) for name in targets},
        # the very list where there is one, which tells that it is the same data set
        ids=first.ids if len(distinct) == 1 else [name for part in distinct for name in part.ids],
        classes={name: classes for name, classes in first.classes.items() if name in targets},
        matches=apart([part.matches for part in sets], matches),
        lazy={name: opened[name] for name in first.lazy},
    )


def _starts(sizes: Iterable[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _require_alike(left: Samples, right: Samples) -> None:
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
