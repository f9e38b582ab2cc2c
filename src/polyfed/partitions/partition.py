"""Partitions: which client holds which items."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int64
from pydantic import Field, field_validator
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.item_classes import Indices


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
        if labels is None and self.needs_labels():
            raise ConfigError(
                f"{name}: needs a label for each item and this source has none; name a label column "
                "under the source's targets, or columns under 'of', or use partition 'iid' or 'quantity'"
            )
        if labels is not None and len(labels) != items:
            raise ConfigError(f"{name}: {len(labels)} labels for {items} items; needs exactly one label for each item")
        classes = None if labels is None else labels.numpy(force=True)
        if groups is None:
            units, members = Units(np.ones(items, dtype=np.int64), classes), None
        else:
            units, members = grouped(groups.numpy(force=True), classes)
        self.require(clients, units.items, units)
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

    def require(self, clients: int, items: int | None, units: Units | None = None) -> None:
        """Check that there is enough to deal out.

        Args:
            clients: how many get some.
            items: to deal out, at most; None: it is not known yet how many.
            units: single items, or groups that stay together, once they are known.

        Raises:
            ConfigError: there is not.
        """
        name, there = f"partition '{self.component_name()}'", items if units is None else len(units)
        if clients < 1:
            raise ConfigError(f"{name}: clients={clients}; needs at least 1")
        if there is not None and clients > there:
            count = f"{there} {units.called if units else 'items'}"
            raise ConfigError(f"{name}: {clients} clients but only {count}; use at most {there} clients")
        if items is not None and clients * self.smallest() > items:
            raise ConfigError(
                f"{name}: min_size={self.smallest()} for {clients} clients needs "
                f"{clients * self.smallest()} items, there are {items}; "
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


# ---- what is dealt out: single items, or groups of items that stay together, such as those of a patient


@dataclass(frozen=True)
class Units:
    """Single items, or groups of items that stay together.

    Attributes:
        sizes: number of items of each unit, at least 1.
        labels: class of each unit, or None.
    """

    sizes: Indices
    labels: Indices | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def items(self) -> int:
        return int(self.sizes.sum())

    @property
    def are_items(self) -> bool:
        return bool((self.sizes == 1).all())

    @property
    def called(self) -> str:
        return "items" if self.are_items else "groups of items"

    def cut(self, order: Indices, ends: Indices) -> list[Indices]:
        """Cut an order of units in pieces: piece k ends before item ``ends[k]`` of that order, the last at the end.

        A unit goes where its middle item lies, so a piece is at most half a unit larger or smaller at each end than
        asked for; single items are cut exactly.
        """
        sizes = self.sizes[order]
        # counted in items before each unit; the smaller of two middles for even sizes
        middles = np.cumsum(sizes) - sizes + (sizes - 1) // 2
        return np.split(order, np.searchsorted(middles, ends, side="left"))

    def cut_evenly(self, order: Indices, pieces: int) -> list[Indices]:
        quotient, remainder = divmod(int(self.sizes[order].sum()), pieces)
        return self.cut(order, np.cumsum(quotient + (np.arange(pieces) < remainder))[:-1])


def grouped(groups: Indices, labels: Indices | None) -> tuple[Units, list[Indices]]:
    """Groups of items as units, in the order of their numbers, and the items of each.

    Args:
        groups: [n] any integers; items with equal ones are a group.
        labels: [n] class of each item. That of a group is the class of most of its items, the smallest of several
            that are equally frequent.
    """
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(group, kind="stable"), np.cumsum(sizes)[:-1])
    if labels is None:
        return Units(sizes), members
    pairs, counts = np.unique(np.stack([group, labels]), axis=1, return_counts=True)
    order = np.lexsort((pairs[1], -counts, pairs[0]))  # by group, then the most frequent class first
    _, first = np.unique(pairs[0][order], return_index=True)
    return Units(sizes, pairs[1][order][first]), members


def with_least(
    units: Units, parts: Sequence[Indices], least: int, choose: Callable[[Indices, int], int]
) -> list[Indices]:
    """Move units to the client with fewest items until all clients have ``least``, or none can spare a unit.

    A unit comes from the client with most items of those that keep ``least`` without it.

    Args:
        units: what is dealt out.
        parts: units of each client.
        least: items that every client shall have.
        choose: (units that a client can spare, in its order; the client that gets one) -> one of these units.
    """
    parts = list(parts)
    sizes = np.array([units.sizes[part].sum() for part in parts], dtype=np.int64)
    while sizes.min() < least:
        for rich in np.argsort(-sizes, kind="stable").tolist():
            # the richest may hold one large group alone, which it cannot give
            spare: Indices = parts[rich][units.sizes[parts[rich]] <= sizes[rich] - least]
            if len(spare):
                break
        else:
            break
        poor = int(sizes.argmin())
        given = choose(spare, poor)
        parts[rich], parts[poor] = parts[rich][parts[rich] != given], np.append(parts[poor], given)
        sizes[[rich, poor]] += np.array([-1, 1]) * units.sizes[given]
    return parts


def partitioned(
    units: Units, held: Mapping[int, Indices], sizes: Indices, rng: np.random.Generator, least: int
) -> list[Indices]:
    """Units of each client, disjoint and complete: every class in the proportions in which clients hold it.

    The items of a class are shared out by largest remainder, the first client first among equal ones, and the class is
    cut there in random order; a unit of several items goes where its middle item lies. Then clients with fewer than
    ``least`` items get units from the client with most that can spare one, of classes that they hold themselves if it
    can spare such.

    Args:
        units: what is dealt out, with a class each.
        held: class -> items of it that each client holds; a class that is missing here, or that nobody holds, is
            shared out by ``sizes``.
        sizes: items that each client holds.
        rng: decides which items of a class go where.
        least: items that every client gets, if there are enough units that can be moved.
    """
    labels = np.asarray(units.labels)
    pieces: list[list[Indices]] = []  # of each class, one a client
    for label in np.unique(labels):
        order = rng.permutation(np.flatnonzero(labels == label))
        share = held.get(int(label), sizes)
        quota = largest_remainder(share if share.sum() else sizes, int(units.sizes[order].sum()))
        pieces.append(units.cut(order, np.cumsum(quota)[:-1]))
    parts = [rng.permutation(np.concatenate(own)) for own in zip(*pieces, strict=True)]

    def smallest_of_own_classes(spare: Indices, poor: int) -> int:
        foreign = np.array([label not in held or not held[label][poor] for label in labels[spare].tolist()])
        return int(spare[np.lexsort((units.sizes[spare], foreign))[0]])

    return with_least(units, parts, least, smallest_of_own_classes)


def largest_remainder(shares: Indices, total: int) -> Indices:
    """``total`` things in proportion to ``shares``: whole parts first, the rest by largest remainder.

    Args:
        shares: [k] not negative, not all zero.
        total: number of things.
    """
    parts, remainders = np.divmod(shares * total, shares.sum())
    parts[np.argsort(-remainders, kind="stable")[: total - int(parts.sum())]] += 1
    return parts
