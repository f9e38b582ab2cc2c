"""Equal random parts."""

from __future__ import annotations

import numpy as np

from polyfed.data.item_classes import Indices
from polyfed.partitions.partition import Partition
from polyfed.partitions.units import Units


class Iid(Partition):
    """Every client gets a random part of the items; sizes differ by at most one, or as whole groups allow."""

    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        return units.cut_evenly(rng.permutation(len(units)), clients)
