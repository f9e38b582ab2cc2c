"""Equal random parts."""

from __future__ import annotations

import numpy as np

from polyfed.data.partition import Indices, Partition


class Iid(Partition):
    """Every client gets a random part of the items; sizes differ by at most one."""

    def assign(self, items: int, labels: Indices | None, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Cut a random order in equal pieces."""
        return np.array_split(rng.permutation(items), clients)
