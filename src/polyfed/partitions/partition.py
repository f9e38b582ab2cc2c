"""Partitions: which client holds which items."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int64
from pydantic import Field, field_validator
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.item_classes import Indices
from polyfed.partitions.units import Units, grouped


class Partition(Settings):
    """A rule that hands items to clients. Subclasses live in ``polyfed.partitions.rules``.

    What is divided are items (pictures, documents), so the captions of one picture always stay together, or groups of
    items (those of a patient) that stay together.
    """

    home: ClassVar[str] = "polyfed.partitions.rules"

    of: tuple[str, ...] = Field(
        default=(),
        max_length=62,
        description="columns whose values together are the class of an item; empty: the source's first target",
    )
    together: str | None = Field(
        default=None, description="column, such as the patient, whose equal values stay with one client; empty: alone"
    )

    @field_validator("of")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        twice = [name for name in value if value.count(name) > 1]
        if twice:
            raise ValueError(f"column '{twice[0]}' is named {value.count(twice[0])} times; name it once")
        return value

    def split(
        self,
        items: int,
        labels: Int64[Tensor, " n"] | None,
        clients: int,
        generator: torch.Generator,
        groups: Int64[Tensor, " n"] | None = None,
    ) -> list[Int64[Tensor, " n_k"]]:
        """Divide n items over ``clients``: the item numbers of each client, disjoint, each in random order.

        Args:
            items: n, how many items there are.
            labels: class of each item, for the partitions that need it; any integers.
            clients: how many lists to make.
            generator: the only source of randomness; one number is drawn from it.
            groups: items with equal numbers stay together; their class is that of most of them, and the smallest of
                several that are equally frequent. A minimum a client counts items all the same.

        Raises:
            ConfigError: labels are needed and absent, there are more clients than items or groups, or a minimum per
                client cannot be kept.
        """
        name = f"partition '{self.component_name()}'"
        classes = self._checked_classes(items, labels, name)
        if groups is None:
            units, members = Units(np.ones(items, dtype=np.int64), classes), None
        else:
            units, members = grouped(groups.numpy(force=True), classes)
        self._require_enough(units, clients, name)
        # one number, whatever the partition draws: what is drawn after it stays the same
        seed = int(torch.randint(2**63 - 1, (1,), generator=generator))
        rng = np.random.default_rng(seed)
        parts = self.assign(units, clients, rng)
        least = min(int(units.sizes[part].sum()) for part in parts)
        if least < self.smallest():  # whole groups may leave less to a client than single items would
            raise ConfigError(
                f"{name}: a client would have {least} items, and {self.smallest()} are promised; the largest group "
                f"that stays together ('{self.together}') has {int(units.sizes.max())}; use fewer clients"
            )
        if members is not None:
            parts = [rng.permutation(np.concatenate([members[unit] for unit in part])) for part in parts]
        return [torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in parts]

    def _checked_classes(self, items: int, labels: Int64[Tensor, " n"] | None, name: str) -> Indices | None:
        if labels is None and self.needs_labels():
            raise ConfigError(
                f"{name}: needs a label for each item and this source has none; name a label column "
                "under the source's targets, or columns under 'of', or use partition 'iid' or 'quantity'"
            )
        if labels is not None and len(labels) != items:
            raise ConfigError(f"{name}: {len(labels)} labels for {items} items; needs exactly one label for each item")
        return None if labels is None else labels.numpy(force=True)

    def _require_enough(self, units: Units, clients: int, name: str) -> None:
        if clients < 1:
            raise ConfigError(f"{name}: clients={clients}; needs at least 1")
        if clients > len(units):
            count = f"{len(units)} {units.called}"
            raise ConfigError(f"{name}: {clients} clients but only {count}; use at most {len(units)} clients")
        if clients * self.smallest() > units.items:
            raise ConfigError(
                f"{name}: min_size={self.smallest()} for {clients} clients needs "
                f"{clients * self.smallest()} items, there are {units.items}; "
                "lower min_size or use fewer clients"
            )

    @abstractmethod
    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        """The numbers of each client's units, disjoint, in random order; called by ``split`` with checked arguments.

        Args:
            units: what is dealt out: single items, or groups of items.
            clients: how many lists to make.
            rng: the only source of randomness.
        """

    def smallest(self) -> int:
        """The number of items that every client is promised: the setting ``min_size``, 1 without."""
        return int(getattr(self, "min_size", 1))

    def needs_labels(self) -> bool:
        return False
