"""Contiguous shards of an order of the items."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from polyfed.core.errors import ConfigError
from polyfed.data.item_classes import Indices
from polyfed.partitions.partition import Partition
from polyfed.partitions.units import Units


class Shards(Partition):
    """Cut an ordered set in shards and give every client ``per_client`` of them at random.

    ``order: random`` is how CreamFL and FedAFD divide captioned pictures (150 shards, 10 a client; 200
    shards, 13 a client): in effect equal random parts. ``order: label`` is the pathological split of McMahan
    et al. (2017), in which a client sees about ``per_client`` classes. Shards that nobody gets stay unused.
    """

    per_client: int = Field(default=2, ge=1, description="shards of each client")
    order: Literal["random", "label"] = Field(default="random", description="what the items are ordered by")
    total: int | None = Field(default=None, ge=1, description="shards in all; default: as many as clients need")

    def needs_labels(self) -> bool:
        return self.order == "label"

    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Cut, deal out, and shuffle within each client."""
        needed = clients * self.per_client
        total = needed if self.total is None else self.total
        if total < needed:
            raise ConfigError(
                f"partition 'shards': total={total}, but {clients} clients with "
                f"per_client={self.per_client} need {needed}; raise total"
            )
        if total > len(units):
            raise ConfigError(
                f"partition 'shards': {total} shards of only {len(units)} {units.called}; "
                "lower per_client or total, or use fewer clients"
            )
        order = rng.permutation(len(units))
        if self.order == "label":
            order = order[np.argsort(np.asarray(units.labels)[order], kind="stable")]
        shards = units.cut_evenly(order, total)
        dealt = rng.permutation(total)[:needed].reshape(clients, self.per_client)
        return [rng.permutation(np.concatenate([shards[shard] for shard in own])) for own in dealt]
