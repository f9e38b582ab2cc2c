"""Partitions of items among clients: evenly, by number, by class, or by a column of the data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from jaxtyping import Int64
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.assembly import Indices


class Partition(Settings):
    """A rule that assigns items to clients. Subclasses live in ``polyfed.partitions.partition``.

    Items (images, documents) are divided, so the captions of one image always stay together, or groups of items (such
    as those of a patient).
    """

    home: ClassVar[str] = "polyfed.partitions.partition"

    of: tuple[str, ...] = Field(
        default=(),
        max_length=62,
        description="columns whose values together are the class of an item; empty: the source's first target",
    )
    together: str | None = Field(default=None, description="column, such as the patient, that keeps items together")

    @field_validator("of")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [name for name in value if value.count(name) > 1]:
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
            groups: items with equal numbers stay together; their class is the most frequent one, the smallest of
                equally frequent ones. Minimum sizes of clients still count items.

        Raises:
            ConfigError: labels are needed and absent, there are more clients than items or groups, or a minimum per
                client cannot be kept.
        """
        name = f"partition '{self.component_name()}'"
        if labels is None and self.needs_labels():
            remedy = (
                "name a label column under its targets, or columns under 'of', or use partition 'iid' or 'quantity'"
            )
            raise ConfigError(f"{name}: needs a label for each item, and the source has none; {remedy}")
        if labels is not None and len(labels) != items:
            raise ConfigError(f"{name}: {len(labels)} labels for {items} items; needs exactly one label for each item")
        classes = None if labels is None else labels.numpy(force=True)
        if groups is None:
            units, members = Units(np.ones(items, dtype=np.int64), classes), None
        else:
            units, members = grouped(groups.numpy(force=True), classes)
        self.require(clients, units.items, units)
        # one number, however many the partition draws: later draws stay the same
        rng = np.random.default_rng(int(torch.randint(2**63 - 1, (1,), generator=generator)))
        parts = self.assign(units, clients, rng)
        least = min(int(units.sizes[part].sum()) for part in parts)
        if least < self.smallest():  # groups may leave less to a client than single items would
            largest = f"the largest group that stays together ('{self.together}') has {int(units.sizes.max())}"
            least_of = f"a client would have {least} items, and {self.smallest()} are promised"
            raise ConfigError(f"{name}: {least_of}; {largest}; use fewer clients")
        if members is not None:
            parts = [rng.permutation(np.concatenate([members[unit] for unit in part])) for part in parts]
        return [torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in parts]

    def require(self, clients: int, items: int | None, units: Units | None = None) -> None:
        """Check that there are enough items for all clients.

        Args:
            clients: Number of clients.
            items: Largest possible number of items; None: unknown.
            units: Single items, or groups that stay together, once they are known.

        Raises:
            ConfigError: there are too few.
        """
        name, there = f"partition '{self.component_name()}'", items if units is None else len(units)
        if clients < 1:
            raise ConfigError(f"{name}: clients={clients}; needs at least 1")
        if there is not None and clients > there:
            count = f"{there} {units.called if units else 'items'}"
            raise ConfigError(f"{name}: {clients} clients but only {count}; use at most {there} clients")
        if items is not None and clients * self.smallest() > items:
            needed = f"min_size={self.smallest()} for {clients} clients needs {clients * self.smallest()} items"
            raise ConfigError(f"{name}: {needed}, there are {items}; lower min_size or use fewer clients")

    @abstractmethod
    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        """The numbers of each client's units, disjoint, in random order; called by ``split`` with checked arguments.

        Args:
            units: single items, or groups of items.
            clients: number of lists.
            rng: the only source of randomness.
        """

    def smallest(self) -> int:
        """Least number of items of each client: the setting ``min_size``, else 1."""
        return int(getattr(self, "min_size", 1))

    def needs_labels(self) -> bool:
        return False


# ---- single items, or groups of items that stay together, such as those of a patient


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

        A unit goes where its middle item lies, so a piece is at most half a unit too large or small at each end; single
        items are cut exactly.
        """
        sizes = self.sizes[order]
        # counted in items before each unit; the smaller of two middles for even sizes
        return np.split(order, np.searchsorted(np.cumsum(sizes) - sizes + (sizes - 1) // 2, ends, side="left"))

    def cut_evenly(self, order: Indices, pieces: int) -> list[Indices]:
        quotient, remainder = divmod(int(self.sizes[order].sum()), pieces)
        return self.cut(order, np.cumsum(quotient + (np.arange(pieces) < remainder))[:-1])


def grouped(groups: Indices, labels: Indices | None) -> tuple[Units, list[Indices]]:
    """Groups of items as units, in the order of their numbers, and the items of each.

    Args:
        groups: [n] any integers; items with equal numbers are a group.
        labels: [n] class of each item. A group has the most frequent class of its items, the smallest of equally
            frequent ones.
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

    A unit comes from the client with most items among those that keep ``least`` without it.

    Args:
        units: All units.
        parts: Units of each client.
        least: Least number of items of each client.
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
        units: All units, with their classes.
        held: class -> items of it that each client holds; a class that is missing here, or that no client holds, is
            shared out by ``sizes``.
        sizes: items that each client holds.
        rng: decides which items of a class go where.
        least: items that every client gets, if there are enough units that can be moved.
    """
    labels = np.asarray(units.labels)
    pieces: list[list[Indices]] = []  # class -> one piece per client
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
    """``total`` units in proportion to ``shares``: integer parts first, the remaining ones by largest remainder.

    Args:
        shares: [k] not negative, not all zero.
        total: number of units.
    """
    parts, remainders = np.divmod(shares * total, shares.sum())
    parts[np.argsort(-remainders, kind="stable")[: total - int(parts.sum())]] += 1
    return parts


class Iid(Partition):
    """Every client gets a random part of the items; sizes differ by at most one, or as groups allow."""

    short_name: ClassVar[str] = "iid"

    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        return units.cut_evenly(rng.permutation(len(units)), clients)


class Quantity(Partition):
    """Sizes follow a Dirichlet distribution; the items of each client are a random sample.

    Every client first gets ``min_size`` items; the others are shared out in proportions p ~ Dir(alpha).
    """

    short_name: ClassVar[str] = "quantity"

    alpha: float = Field(default=0.5, gt=0, le=1e6, description="concentration; smaller is more unequal")
    min_size: int = Field(default=10, ge=1, description="items that every client has at least")

    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Split a random order into Dirichlet-sized pieces, then top up clients that indivisible groups leave short."""
        spare = units.items - clients * self.min_size
        shares = rng.dirichlet(np.full(clients, self.alpha))
        # the minimum comes first, and only the remaining items in random shares
        ends = np.floor(np.cumsum(shares) * spare).astype(np.int64) + self.min_size * np.arange(1, clients + 1)
        parts = units.cut(rng.permutation(len(units)), ends[:-1])
        return with_least(units, parts, self.min_size, lambda spare, _: int(spare[-1]))


class Drop(Partition):
    """Equal random parts, then each client keeps a share drawn from U[keep_least, keep_most].

    FedCola (Sun et al. 2024) divides Flickr and COCO images so, with 0.95 to 0.99. No client
    holds the dropped items.
    """

    short_name: ClassVar[str] = "drop"

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


class Shards(Partition):
    """Cut an ordered set in shards and give every client ``per_client`` of them at random.

    ``order: random`` is how CreamFL and FedAFD divide captioned images (150 shards, 10 a client; 200
    shards, 13 a client): in effect equal random parts. ``order: label`` is the pathological split of McMahan
    et al. (2017), in which a client sees about ``per_client`` classes. Unassigned shards stay unused.
    """

    short_name: ClassVar[str] = "shards"

    per_client: int = Field(default=2, ge=1, description="shards of each client")
    order: Literal["random", "label"] = Field(default="random", description="order of the items")
    total: int | None = Field(default=None, ge=1, description="shards in all; default: as many as clients need")

    def needs_labels(self) -> bool:
        return self.order == "label"

    def require(self, clients: int, items: int | None, units: Units | None = None) -> None:
        """See ``Partition``; also needs as many shards as clients get, and no more than items."""
        super().require(clients, items, units)
        needed, there = clients * self.per_client, items if units is None else len(units)
        if (total := self.total or needed) < needed:
            given = f"total={total}, but {clients} clients with per_client={self.per_client} need {needed}"
            raise ConfigError(f"partition 'shards': {given}; raise total")
        if there is not None and total > there:
            given = f"{total} shards of only {there} {units.called if units else 'items'}"
            raise ConfigError(f"partition 'shards': {given}; lower per_client or total, or use fewer clients")

    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Cut, deal out, and shuffle within each client."""
        needed = clients * self.per_client
        total = self.total or needed
        order = rng.permutation(len(units))
        if self.order == "label":
            order = order[np.argsort(np.asarray(units.labels)[order], kind="stable")]
        shards = units.cut_evenly(order, total)
        chosen = rng.permutation(total)[:needed].reshape(clients, self.per_client)
        return [rng.permutation(np.concatenate([shards[shard] for shard in own])) for own in chosen]


_DRAWS = 1000  # before giving up on min_size
_ENOUGH, _MANY = 20, 10  # draws after which to give up if more clients than this are always too small


class Dirichlet(Partition):
    """Each class is shared out in proportions p ~ Dir(alpha), with a cap on the size of a client.

    The routine of Yurochkin et al. (2019) in the form that CreamFL, FedCola and FedAFD use: a client that
    already holds n / clients items gets p = 0 for the classes that follow, p is normalised again, and the
    class is cut at floor(cumsum(p) n_class). All is drawn again until the smallest client has ``min_size``
    items. Because of the cap, a very small alpha does not make sizes arbitrarily unequal. Groups of items that stay
    together go to the client in whose part of the class their middle item lies; sizes, cap and ``min_size`` count
    items.
    """

    short_name: ClassVar[str] = "dirichlet"

    alpha: float = Field(default=0.5, gt=0, le=1e6, description="concentration; smaller is more skewed")
    min_size: int = Field(default=10, ge=1, description="items that every client has at least")

    def needs_labels(self) -> bool:
        return True

    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Draw the sizes until they are acceptable, then the items."""
        _, class_index, number = np.unique(np.asarray(units.labels), return_inverse=True, return_counts=True)
        # where groups can be cut depends on their order; that of single items is drawn when their counts are known
        order = np.arange(len(units)) if units.are_items else rng.permutation(len(units))
        order = order[np.argsort(class_index[order], kind="stable")]
        counts = self._counts(np.split(units.sizes[order], np.cumsum(number)[:-1]), clients, rng)
        if units.are_items:
            order = rng.permutation(len(units))
            order = order[np.argsort(class_index[order], kind="stable")]
        # one class after another, in random order within a class
        pieces = np.split(order, np.cumsum(counts.ravel())[:-1])
        return [rng.permutation(np.concatenate(pieces[client::clients])) for client in range(clients)]

    def _counts(self, sizes: list[Indices], clients: int, rng: np.random.Generator) -> Indices:
        """Class x client table of numbers of units, redrawn until every client has ``min_size`` items."""
        best, fewest = 0, clients
        cuttable = [Units(each) for each in sizes]
        for attempt in range(1, _DRAWS + 1):
            counts, held = _draw(cuttable, clients, self.alpha, rng)
            best = max(best, int(held.min()))
            if best >= self.min_size:
                return counts
            fewest = min(fewest, int((held < self.min_size).sum()))
            if attempt >= _ENOUGH and fewest > max(_MANY, clients // 10):
                break  # so many never come right at once
        settings = f"with alpha={self.alpha}, {clients} clients and {len(sizes)} classes"
        result = f"the smallest client had at most {best} items in {attempt} draws, min_size={self.min_size}"
        remedy = "raise alpha, lower min_size or use fewer clients"
        raise ConfigError(f"partition 'dirichlet': {settings} {result}; {remedy}")


def _draw(classes: list[Units], clients: int, alpha: float, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """One draw of the class x client table of numbers of units, and the items that each client holds then."""
    cap = sum(units.items for units in classes) / clients
    held = np.zeros(clients, dtype=np.int64)
    counts = np.zeros((len(classes), clients), dtype=np.int64)
    for row, units in zip(counts, classes, strict=True):
        # a Dirichlet draw normalised over the clients below the cap is a Dirichlet draw over just these;
        # drawn so, it cannot come out as 0 / 0 for a tiny alpha
        below = np.flatnonzero(held < cap)
        cuts = np.floor(np.cumsum(rng.dirichlet(np.full(len(below), alpha))) * units.items).astype(np.int64)
        pieces = units.cut(np.arange(len(units)), cuts[:-1])
        row[below] = [len(piece) for piece in pieces]
        held[below] += [int(units.sizes[piece].sum()) for piece in pieces]
    return counts, held


class Natural(Partition):
    """All items of the k-th most frequent class for client k, such as ``of: [country]``; rare classes are merged.

    Classes go by their number of items, the smallest class first among equally frequent ones. The first ``clients``
    classes make one client each; every further class, the most frequent first, joins the client that has fewest
    items by then, the last of several. Nothing is random but the order of a client's items.
    """

    short_name: ClassVar[str] = "natural"

    min_size: int = Field(default=1, ge=1, description="items that every client must have")

    def needs_labels(self) -> bool:
        return True

    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        classes, class_index = np.unique(np.asarray(units.labels), return_inverse=True)
        if len(classes) < clients:
            given = f"{clients} clients, but the items are of {len(classes)} classes"
            remedy = f"use at most {len(classes)} clients, or more columns under 'of'"
            raise ConfigError(f"partition 'natural': {given}; {remedy}")
        amounts = np.bincount(class_index, weights=units.sizes).astype(np.int64)
        holder, held = np.zeros(len(classes), dtype=np.int64), np.zeros(clients, dtype=np.int64)
        for rank, label in enumerate(np.argsort(-amounts, kind="stable")):
            # the last of several clients that hold least
            client = rank if rank < clients else clients - 1 - int(held[::-1].argmin())
            holder[label] = client
            held[client] += amounts[label]
        parts = [rng.permutation(np.flatnonzero(holder[class_index] == client)) for client in range(clients)]
        sizes = [int(units.sizes[part].sum()) for part in parts]
        if min(sizes) < self.min_size:
            given = f"min_size={self.min_size}, but {len(sizes)} clients would hold {sizes} items"
            raise ConfigError(f"partition 'natural': {given}; lower min_size or use fewer clients")
        return parts
