"""What is dealt out among clients: single items, or groups of items that stay together, such as those of a patient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Units:
    """Single items, or groups of items that stay together.

    Attributes:
        sizes: number of items of each unit, at least 1.
        labels: class of each unit, or None.
    """

    sizes: Indices
    labels: Indices | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def items(self) -> int:
        """Number of items of all."""
        return int(self.sizes.sum())

    @property
    def are_items(self) -> bool:
        """Whether every unit is a single item."""
        return bool((self.sizes == 1).all())

    @property
    def called(self) -> str:
        """What they are, for messages."""
        return "items" if self.are_items else "groups of items"

    def cut(self, order: Indices, ends: Indices) -> list[Indices]:
        """Cut an order of units in pieces: piece k ends before item ``ends[k]`` of that order, the last at the end.

        A unit goes where its middle item lies, so a piece is at most half a unit larger or smaller at each end than
        asked for; single items are cut exactly.
        """
        sizes = self.sizes[order]
        middles = np.cumsum(sizes) - sizes + (sizes - 1) // 2
        return np.split(order, np.searchsorted(middles, ends, side="left"))

    def cut_evenly(self, order: Indices, pieces: int) -> list[Indices]:
        """Cut an order of units in pieces of equal numbers of items, as nearly as whole units allow."""
        whole, rest = divmod(int(self.sizes[order].sum()), pieces)
        sizes = whole + (np.arange(pieces) < rest)
        return self.cut(order, np.cumsum(sizes)[:-1])


def filled(units: Units, parts: Sequence[Indices], least: int, choose: Callable[[Indices, int], int]) -> list[Indices]:
    """Move units to the client with fewest items until all clients have ``least``, or none can spare a unit.

    A unit comes from the client with most items of those that keep ``least`` without it.

    Args:
        units: what is dealt out.
        parts: units of each client.
        least: items that every client shall have.
        choose: (units that a client can spare, in its order; the client that gets one) -> one of these units.
    """
    found = list(parts)
    sizes = np.array([units.sizes[part].sum() for part in found], dtype=np.int64)
    while sizes.min() < least and (offer := _spare(units, found, sizes, least)) is not None:
        (rich, spare), short = offer, int(sizes.argmin())
        given = choose(spare, short)
        found[rich], found[short] = found[rich][found[rich] != given], np.append(found[short], given)
        sizes[rich] -= units.sizes[given]
        sizes[short] += units.sizes[given]
    return found


def _spare(units: Units, parts: Sequence[Indices], sizes: Indices, least: int) -> tuple[int, Indices] | None:
    """The client with most items of those that can give a unit, and the units that it can give; None: no client can."""
    for rich in np.argsort(-sizes, kind="stable").tolist():
        given: Indices = parts[rich][units.sizes[parts[rich]] <= sizes[rich] - least]
        if len(given):
            return rich, given
    return None


def grouped(groups: Indices, labels: Indices | None) -> tuple[Units, list[Indices]]:
    """Groups of items as units, in the order of their numbers, and the items of each.

    Args:
        groups: [n] any integers; items with equal ones are a group.
        labels: [n] class of each item. That of a group is the class of most of its items, the smallest of several
            that are equally frequent.
    """
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(group, kind="stable"), np.cumsum(sizes)[:-1])
    return Units(sizes, None if labels is None else _most_frequent(group, labels)), members


def _most_frequent(group: Indices, labels: Indices) -> Indices:
    """The class of each group, groups numbered from 0."""
    pairs, counts = np.unique(np.stack([group, labels]), axis=1, return_counts=True)
    order = np.lexsort((pairs[1], -counts, pairs[0]))
    _, first = np.unique(pairs[0][order], return_index=True)
    chosen: Indices = pairs[1][order][first]
    return chosen
