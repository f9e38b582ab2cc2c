"""Clients as the data have them: hospitals, countries, scanners."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from polyfed.core.errors import ConfigError
from polyfed.data.item_classes import Indices
from polyfed.partitions.partition import Partition
from polyfed.partitions.units import Units


class Natural(Partition):
    """Client k holds all items of the k-th most frequent class, such as ``of: [country]``; rare classes are merged.

    Classes go by their number of items, the smallest class first among equally frequent ones. The first ``clients``
    classes make one client each; every further class, the most frequent first, joins the client that has fewest
    items by then, the last of several. Nothing is random but the order of a client's items.
    """

    min_size: int = Field(default=1, ge=1, description="items that every client must have")

    def needs_labels(self) -> bool:
        return True

    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        classes, kind = np.unique(np.asarray(units.labels), return_inverse=True)
        if len(classes) < clients:
            raise ConfigError(
                f"partition 'natural': {clients} clients, but the items are of {len(classes)} classes; "
                f"use at most {len(classes)} clients, or more columns under 'of'"
            )
        holder = _holders(np.bincount(kind, weights=units.sizes).astype(np.int64), clients)
        parts = [rng.permutation(np.flatnonzero(holder[kind] == client)) for client in range(clients)]
        sizes = [int(units.sizes[part].sum()) for part in parts]
        if min(sizes) < self.min_size:
            raise ConfigError(
                f"partition 'natural': min_size={self.min_size}, but {len(sizes)} clients would hold {sizes} items; "
                "lower min_size or use fewer clients"
            )
        return parts


def _holders(sizes: Indices, clients: int) -> Indices:
    """The client of each class, given the classes' numbers of items."""
    holder = np.zeros(len(sizes), dtype=np.int64)
    held = np.zeros(clients, dtype=np.int64)
    for place, label in enumerate(np.argsort(-sizes, kind="stable")):
        # the last of several clients that hold least
        client = place if place < clients else clients - 1 - int(held[::-1].argmin())
        holder[label] = client
        held[client] += sizes[label]
    return holder
