"""What is dealt out among clients: single items, or groups of items that stay together, such as those of a patient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polyfed.data.item_classes import Indices


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
        return int(self.sizes.sum())

    @property
    def are_items(self) -> bool:
        return bool((self.sizes == 1).all())

    @property
    def called(self) -> str:
        return "items" if self.are_items else "groups of items"

    def cut(self, order: Indices, ends: Indices) -> list[Indices]:
        """Cut an order of units in pieces: piece k ends before item ``ends[k]`` of that order, the last at the end.

        A unit goes where its middle item lies, so a piece is at most half a unit larger or smaller at each end than
        asked for; single items are cut exactly.
        """
        sizes = self.sizes[order]
        # counted in items before each unit; the smaller of two middles for even sizes
        middles = np.cumsum(sizes) - sizes + (sizes - 1) // 2
        return np.split(order, np.searchsorted(middles, ends, side="left"))

    def cut_evenly(self, order: Indices, pieces: int) -> list[Indices]:
        quotient, remainder = divmod(int(self.sizes[order].sum()), pieces)
        return self.cut(order, np.cumsum(quotient + (np.arange(pieces) < remainder))[:-1])


def grouped(groups: Indices, labels: Indices | None) -> tuple[Units, list[Indices]]:
    """Groups of items as units, in the order of their numbers, and the items of each.

    Args:
        groups: [n] any integers; items with equal ones are a group.
        labels: [n] class of each item. That of a group is the class of most of its items, the smallest of several
            that are equally frequent.
    """
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(group, kind="stable"), np.cumsum(sizes)[:-1])
    if labels is None:
        return Units(sizes), members
    pairs, counts = np.unique(np.stack([group, labels]), axis=1, return_counts=True)
    order = np.lexsort((pairs[1], -counts, pairs[0]))  # by group, then the most frequent class first
    _, first = np.unique(pairs[0][order], return_index=True)
    return Units(sizes, pairs[1][order][first]), members


def filled(units: Units, parts: Sequence[Indices], least: int, choose: Callable[[Indices, int], int]) -> list[Indices]:
    """Move units to the client with fewest items until all clients have ``least``, or none can spare a unit.

    A unit comes from the client with most items of those that keep ``least`` without it.

    Args:
        units: what is dealt out.
        parts: units of each client.
        least: items that every client shall have.
        choose: (units that a client can spare, in its order; the client that gets one) -> one of these units.
    """
    parts = list(parts)
    sizes = np.array([units.sizes[part].sum() for part in parts], dtype=np.int64)
    while sizes.min() < least:
        for rich in np.argsort(-sizes, kind="stable").tolist():
            # the richest may hold one large group alone, which it cannot give
            spare: Indices = parts[rich][units.sizes[parts[rich]] <= sizes[rich] - least]
            if len(spare):
                break
        else:
            break
        poor = int(sizes.argmin())
        given = choose(spare, poor)
        parts[rich], parts[poor] = parts[rich][parts[rich] != given], np.append(parts[poor], given)
        sizes[[rich, poor]] += np.array([-1, 1]) * units.sizes[given]
    return parts


def dealt(
    units: Units, held: Mapping[int, Indices], sizes: Indices, rng: np.random.Generator, least: int
) -> list[Indices]:
    """Units of each client, disjoint and complete: every class in the proportions in which clients hold it.

    The items of a class are shared out by largest remainder, the first client first among equal ones, and the class is
    cut there in random order; a unit of several items goes where its middle item lies. Then clients with fewer than
    ``least`` items get units from the client with most that can spare one, of classes that they hold themselves if it
    can spare such.

    Args:
        units: what is dealt out, with a class each.
        held: class -> items of it that each client holds; a class that is missing here, or that nobody holds, is
            shared out by ``sizes``.
        sizes: items that each client holds.
        rng: decides which items of a class go where.
        least: items that every client gets, if there are enough units that can be moved.
    """
    labels = np.asarray(units.labels)
    pieces: list[list[Indices]] = []  # of each class, one a client
    for label in np.unique(labels):
        order = rng.permutation(np.flatnonzero(labels == label))
        share = held.get(int(label), sizes)
        quota = largest_remainder(share if share.sum() else sizes, int(units.sizes[order].sum()))
        pieces.append(units.cut(order, np.cumsum(quota)[:-1]))
    parts = [rng.permutation(np.concatenate(own)) for own in zip(*pieces, strict=True)]

    def smallest_of_own_classes(spare: Indices, poor: int) -> int:
        foreign = np.array([label not in held or not held[label][poor] for label in labels[spare].tolist()])
        return int(spare[np.lexsort((units.sizes[spare], foreign))[0]])

    return filled(units, parts, least, smallest_of_own_classes)


def largest_remainder(shares: Indices, total: int) -> Indices:
    """``total`` things in proportion to ``shares``: whole parts first, the rest by largest remainder.

    Args:
        shares: [k] not negative, not all zero.
        total: number of things.
    """
    parts, remainders = np.divmod(shares * total, shares.sum())
    parts[np.argsort(-remainders, kind="stable")[: total - int(parts.sum())]] += 1
    return parts
