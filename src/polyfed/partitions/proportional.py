"""Dealing out test items among clients in the proportions in which they hold the classes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polyfed.data.units import Indices, Units, filled


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
    parts: list[list[Indices]] = [[] for _ in sizes]
    for label in np.unique(labels):
        order = rng.permutation(np.flatnonzero(labels == label))
        share = held.get(int(label), sizes)
        quota = largest_remainder(share if share.sum() else sizes, int(units.sizes[order].sum()))
        for part, piece in zip(parts, units.cut(order, np.cumsum(quota)[:-1]), strict=True):
            part.append(piece)
    whole = [rng.permutation(np.concatenate(pieces)) for pieces in parts]

    def smallest_of_own_classes(spare: Indices, short: int) -> int:
        unlike = np.array([not _holds(units, int(unit), held, short) for unit in spare])
        return int(spare[np.lexsort((units.sizes[spare], unlike))[0]])

    return filled(units, whole, least, smallest_of_own_classes)


def largest_remainder(shares: Indices, total: int) -> Indices:
    """``total`` things in proportion to ``shares``: whole parts first, the rest by largest remainder.

    Args:
        shares: [k] not negative, not all zero.
        total: number of things.
    """
    whole, rest = np.divmod(shares * total, shares.sum())
    ordered = np.argsort(-rest, kind="stable")
    whole[ordered[: total - int(whole.sum())]] += 1
    return whole


def _holds(units: Units, unit: int, held: Mapping[int, Indices], client: int) -> bool:
    own = held.get(int(np.asarray(units.labels)[unit]))
    return own is not None and bool(own[client])
