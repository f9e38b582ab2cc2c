"""Partitions: which client holds which items."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from polyfed.errors import ConfigError
from polyfed.settings import Component

Indices = NDArray[np.int64]


class Partition(Component):
    """A rule that hands items to clients. Subclasses live in ``polyfed.data.partitions``, one a module.

    What is divided are items (pictures, documents), so the captions of one picture always stay together.
    """

    home: ClassVar[str] = "polyfed.data.partitions"

    def split(
        self, items: int, labels: Int64[Tensor, " n"] | None, clients: int, generator: torch.Generator
    ) -> list[Int64[Tensor, " n_k"]]:
        """Divide n items over ``clients``: the item numbers of each client, disjoint, each in random order.

        Args:
            items: n, how many items there are.
            labels: class of each item, for the partitions that need it; any integers.
            clients: how many lists to make.
            generator: the only source of randomness; one number is drawn from it.

        Raises:
            ConfigError: labels are needed and absent, there are more clients than items, or a minimum per
                client cannot be kept.
        """
        self._check(items, labels, clients)
        seed = int(torch.randint(2**63 - 1, (1,), generator=generator))
        known = None if labels is None else labels.numpy(force=True)
        parts = self.assign(items, known, clients, np.random.default_rng(seed))
        return [torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in parts]

    @abstractmethod
    def assign(self, items: int, labels: Indices | None, clients: int, rng: np.random.Generator) -> list[Indices]:
        """The item numbers of each client; called by ``split`` with checked arguments."""

    def smallest(self) -> int:
        """The number of items that every client is promised; 1 unless the partition has a setting for it."""
        return 1

    def needs_labels(self) -> bool:
        """Whether the partition goes by the classes of the items."""
        return False

    def _check(self, items: int, labels: Tensor | None, clients: int) -> None:
        name = f"partition '{self.component_name()}'"
        if clients < 1:
            raise ConfigError(f"{name}: clients={clients}; needs at least 1")
        if clients > items:
            raise ConfigError(f"{name}: {clients} clients but only {items} items; use at most {items} clients")
        if labels is None and self.needs_labels():
            raise ConfigError(
                f"{name}: needs a label for each item and this source has none; name a label column "
                "under the source's targets, or use partition 'iid' or 'quantity'"
            )
        if labels is not None and len(labels) != items:
            raise ConfigError(f"{name}: {len(labels)} labels for {items} items; needs exactly one label for each item")
        if clients * self.smallest() > items:
            raise ConfigError(
                f"{name}: min_size={self.smallest()} for {clients} clients needs "
                f"{clients * self.smallest()} items, there are {items}; "
                "lower min_size or use fewer clients"
            )
