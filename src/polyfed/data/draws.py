"""Splits that are drawn where nothing tells them: the same rows on every machine, equal keys together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from polyfed.core.errors import DataError


def drawn_splits(keys: Sequence[object], shares: Mapping[str, float], where: str) -> tuple[str, ...]:
    """Split of each row, by a hash of its key: so large a share of the different keys, the rest ``train``.

    Raises:
        DataError: they are too few; the message begins with ``where``.
    """
    order = sorted(set(keys), key=lambda key: hashlib.sha256(str(key).encode()).digest())
    split_of = dict.fromkeys(order, "train")
    counts = {split: round(share * len(order)) or bool(share) for split, share in shares.items()}
    if order and sum(counts.values()) >= len(order):
        raise DataError(
            f"{where} has {len(order)} items, too few to draw {' and '.join(counts)} from and leave some for "
            "train; add items, or set these shares to 0 (fractions)"
        )
    start = 0
    for split, count in counts.items():
        split_of |= dict.fromkeys(order[start : start + count], split)
        start += count
    return tuple(split_of[key] for key in keys)


def key_of(values: Sequence[object]) -> str:
    """A key for the values of a row."""
    return "\x1f".join("<NA>" if value is None else str(value) for value in values)
