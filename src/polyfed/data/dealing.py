"""Dealing out test items among clients in the proportions in which they hold the classes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polyfed.data.units import Indices, Units


def dealt(
    units: Units, held: Mapping[int, Indices], sizes: Indices, rng: np.random.Generator, least: int
) -> list[Indices]:
    """Units of each client, disjoint and complete: every class in the proportions in which clients hold it.

    The items of a class are shared out by largest remainder, the first client first among equal ones, and the class is
    cut there in random order; a unit of several items goes where its middle item lies. Then clients with fewer than
    ``least`` items get units from the client with most, of classes that they hold themselves if it has any.

    Args:
        units: what is dealt out, with a class each.
        held: class -> items of it that each client holds; a class that is missing here, or that nobody holds, is
            shared out by ``sizes``.
        sizes: items that each client holds.
        rng: decides which items of a class go where.
        least: items that every client gets, if there are enough.
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
    return _filled(units, whole, held, least)


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


def _filled(units: Units, parts: list[Indices], held: Mapping[int, Indices], least: int) -> list[Indices]:
    """Move units from the client with most items to the one with fewest while that helps."""
    sizes = np.array([int(units.sizes[part].sum()) for part in parts], dtype=np.int64)
    while sizes.min() < least:
        short, rich = int(sizes.argmin()), int(sizes.argmax())
        spare = [k for k, unit in enumerate(parts[rich]) if sizes[rich] - units.sizes[unit] >= least]
        if not spare:
            break
        owned = [_holds(units, int(unit), held, short) for unit in parts[rich]]
        place = min(spare, key=lambda k: (not owned[k], units.sizes[parts[rich][k]]))
        unit = parts[rich][place]
        parts[rich], parts[short] = np.delete(parts[rich], place), np.append(parts[short], unit)
        sizes[rich] -= units.sizes[unit]
        sizes[short] += units.sizes[unit]
    return parts


def _holds(units: Units, unit: int, held: Mapping[int, Indices], client: int) -> bool:
    own = held.get(int(np.asarray(units.labels)[unit]))
    return own is not None and bool(own[client])
