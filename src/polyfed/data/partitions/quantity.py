"""Quantity skew: clients differ in how much they have, not in what."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from polyfed.data.partition import Indices, Partition, Units


class Quantity(Partition):
    """Sizes follow a Dirichlet distribution; the items of each client are a random sample.

    Every client first gets ``min_size`` items; the rest is shared out in proportions p ~ Dir(alpha).
    """

    alpha: float = Field(default=0.5, gt=0, le=1e6, description="concentration; smaller is more unequal")
    min_size: int = Field(default=10, ge=1, description="items that every client has at least")

    def smallest(self) -> int:
        """``min_size``."""
        return self.min_size

    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Cut a random order in pieces of Dirichlet sizes; a client that whole groups leave short gets more."""
        spare = units.items - clients * self.min_size
        shares = rng.dirichlet(np.full(clients, self.alpha))
        ends = np.floor(np.cumsum(shares) * spare).astype(np.int64) + self.min_size * np.arange(1, clients + 1)
        parts = units.cut(rng.permutation(len(units)), ends[:-1])
        return _filled(units, parts, self.min_size)


def _filled(units: Units, parts: list[Indices], least: int) -> list[Indices]:
    """Move units from the client with most items to the one with fewest until all have ``least``, or none is left."""
    sizes = np.array([units.sizes[part].sum() for part in parts])
    while sizes.min() < least:
        short, rich = int(sizes.argmin()), int(sizes.argmax())
        given = parts[rich][-1]
        if sizes[rich] - units.sizes[given] < least:
            break  # told by the caller
        parts[rich], parts[short] = parts[rich][:-1], np.append(parts[short], given)
        sizes[rich] -= units.sizes[given]
        sizes[short] += units.sizes[given]
    return parts
