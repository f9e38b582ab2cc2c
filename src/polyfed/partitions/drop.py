"""The mild quantity skew of FedCola: equal parts, of which every client loses a few per cent."""

from __future__ import annotations

from typing import Self

import numpy as np
from pydantic import Field, model_validator

from polyfed.data.item_classes import Indices
from polyfed.partitions.partition import Partition
from polyfed.partitions.units import Units


class Drop(Partition):
    """Equal random parts, then each client keeps a share drawn from U[keep_least, keep_most].

    FedCola (Sun et al. 2024) divides Flickr and COCO pictures so, with 0.95 to 0.99. What is dropped is held
    by nobody.
    """

    keep_least: float = Field(default=0.95, gt=0, le=1, description="smallest share of its items that a client keeps")
    keep_most: float = Field(default=0.99, gt=0, le=1, description="largest share of its items that a client keeps")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.keep_least > self.keep_most:
            raise ValueError(f"keep_least={self.keep_least} is above keep_most={self.keep_most}; swap them")
        return self

    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        parts = units.cut_evenly(rng.permutation(len(units)), clients)
        kept = rng.uniform(self.keep_least, self.keep_most, size=clients)
        for client, (part, share) in enumerate(zip(parts, kept, strict=True)):
            # a client must keep something, or it could not train
            shortened = units.cut(part, np.array([int(share * units.sizes[part].sum())]))[0]
            parts[client] = shortened if len(shortened) else part[:1]
        return parts
