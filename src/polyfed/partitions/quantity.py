"""Quantity skew: clients differ in how much they have, not in what."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from polyfed.data.item_classes import Indices
from polyfed.partitions.partition import Partition
from polyfed.partitions.units import Units, filled


class Quantity(Partition):
    """Sizes follow a Dirichlet distribution; the items of each client are a random sample.

    Every client first gets ``min_size`` items; the rest is shared out in proportions p ~ Dir(alpha).
    """

    alpha: float = Field(default=0.5, gt=0, le=1e6, description="concentration; smaller is more unequal")
    min_size: int = Field(default=10, ge=1, description="items that every client has at least")

    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Cut a random order in pieces of Dirichlet sizes; a client that whole groups leave short gets more."""
        spare = units.items - clients * self.min_size
        shares = rng.dirichlet(np.full(clients, self.alpha))
        # the minimum is given out first, and only the rest in random shares
        ends = np.floor(np.cumsum(shares) * spare).astype(np.int64) + self.min_size * np.arange(1, clients + 1)
        parts = units.cut(rng.permutation(len(units)), ends[:-1])
        return filled(units, parts, self.min_size, lambda spare, _: int(spare[-1]))
