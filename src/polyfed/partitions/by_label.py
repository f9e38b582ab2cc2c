"""Each client holds a few classes only."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from polyfed.core.errors import ConfigError
from polyfed.data.item_classes import Indices
from polyfed.partitions.partition import Partition
from polyfed.partitions.units import Units


class ByLabel(Partition):
    """Every client holds items of exactly ``classes_per_client`` classes, and every class has a holder.

    Classes are dealt out in turn from a random order, so they have equally many holders (give or take one),
    and the items of a class (or its groups of items that stay together) are divided equally among its holders.
    With one class a client and as many clients as classes, the label is the client: data with a hospital or a
    writer keep their natural split.
    """

    classes_per_client: int = Field(default=2, ge=1, description="classes of each client")

    def needs_labels(self) -> bool:
        return True

    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Deal out the classes, then the items of each class among its holders."""
        classes, kind = np.unique(np.asarray(units.labels), return_inverse=True)
        holders = self._holders(len(classes), clients, rng)
        parts: list[list[Indices]] = [[] for _ in range(clients)]
        for label, own in enumerate(holders):
            members = rng.permutation(np.flatnonzero(kind == label))
            if len(members) < len(own):
                raise ConfigError(
                    f"partition 'by_label': class {classes[label]} has {len(members)} {units.called} for {len(own)} "
                    "clients; lower classes_per_client or use fewer clients"
                )
            for client, piece in zip(own, np.array_split(members, len(own)), strict=True):
                parts[client].append(piece)
        return [rng.permutation(np.concatenate(pieces)) for pieces in parts]

    def _holders(self, classes: int, clients: int, rng: np.random.Generator) -> list[list[int]]:
        """The clients that hold each class."""
        each, hands = self.classes_per_client, clients * self.classes_per_client
        if each > classes or hands < classes:
            raise ConfigError(
                f"partition 'by_label': classes_per_client={each} with {clients} clients and {classes} "
                f"classes; it must be between {-(-classes // clients)} and {classes}"
            )
        order, turns = rng.permutation(classes), rng.permutation(clients)
        holders: list[list[int]] = [[] for _ in range(classes)]
        # in turn, so that numbers of holders differ by one at most and no client gets a class twice
        for hand in range(hands):
            holders[order[hand % classes]].append(int(turns[hand // each]))
        return holders
