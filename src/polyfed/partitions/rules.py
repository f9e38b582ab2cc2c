"""How items are dealt out to clients: evenly, by number, by class, or as the data have it."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from polyfed.core.errors import ConfigError
from polyfed.data.item_classes import Indices
from polyfed.partitions.partition import Partition, Units, with_least


class Iid(Partition):
    """Every client gets a random part of the items; sizes differ by at most one, or as whole groups allow."""

    short_name: ClassVar[str] = "iid"

    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        return units.cut_evenly(rng.permutation(len(units)), clients)


class Quantity(Partition):
    """Sizes follow a Dirichlet distribution; the items of each client are a random sample.

    Every client first gets ``min_size`` items; the rest is shared out in proportions p ~ Dir(alpha).
    """

    short_name: ClassVar[str] = "quantity"

    alpha: float = Field(default=0.5, gt=0, le=1e6, description="concentration; smaller is more unequal")
    min_size: int = Field(default=10, ge=1, description="items that every client has at least")

    def assign(self, units: Units, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Cut a random order in pieces of Dirichlet sizes; a client that whole groups leave short gets more."""
        spare = units.items - clients * self.min_size
        shares = rng.dirichlet(np.full(clients, self.alpha))
        # the minimum is given out first, and only the rest in random shares
        ends = np.floor(np.cumsum(shares) * spare).astype(np.int64) + self.min_size * np.arange(1, clients + 1)
        parts = units.cut(rng.permutation(len(units)), ends[:-1])
        return with_least(units, parts, self.min_size, lambda spare, _: int(spare[-1]))


class Drop(Partition):
    """Equal random parts, then each client keeps a share drawn from U[keep_least, keep_most].

    FedCola (Sun et al. 2024) divides Flickr and COCO pictures so, with 0.95 to 0.99. What is dropped is held
    by nobody.
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

    ``order: random`` is how CreamFL and FedAFD divide captioned pictures (150 shards, 10 a client; 200
    shards, 13 a client): in effect equal random parts. ``order: label`` is the pathological split of McMahan
    et al. (2017), in which a client sees about ``per_client`` classes. Shards that nobody gets stay unused.
    """

    short_name: ClassVar[str] = "shards"

    per_client: int = Field(default=2, ge=1, description="shards of each client")
    order: Literal["random", "label"] = Field(default="random", description="what the items are ordered by")
    total: int | None = Field(default=None, ge=1, description="shards in all; default: as many as clients need")

    def needs_labels(self) -> bool:
        return self.order == "label"

    def require(self, clients: int, items: int | None, units: Units | None = None) -> None:
        """See ``Partition``; there must be as many shards as clients get, and no more than items."""
        super().require(clients, items, units)
        needed, there = clients * self.per_client, items if units is None else len(units)
        total = self.total or needed
        if total < needed:
            raise ConfigError(
                f"partition 'shards': total={total}, but {clients} clients with "
                f"per_client={self.per_client} need {needed}; raise total"
            )
        if there is not None and total > there:
            raise ConfigError(
                f"partition 'shards': {total} shards of only {there} {units.called if units else 'items'}; "
                "lower per_client or total, or use fewer clients"
            )

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


_ENOUGH, _MANY = 20, 10  # draws after which it is given up if more clients than so many are always too small


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
    size_cap: bool = Field(
        default=True, description="whether who holds a client's share of all items already gets no more classes"
    )
    attempts: int = Field(default=1000, ge=1, le=1_000_000, description="draws before giving up on min_size")

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
        for attempt in range(1, self.attempts + 1):
            counts, held = _draw(cuttable, clients, self.alpha, rng, capped=self.size_cap)
            best = max(best, int(held.min()))
            if best >= self.min_size:
                return counts
            fewest = min(fewest, int((held < self.min_size).sum()))
            if attempt >= _ENOUGH and fewest > max(_MANY, clients // 10):
                break  # so many never come right at once
        raise ConfigError(
            f"partition 'dirichlet': with alpha={self.alpha}, {clients} clients and {len(sizes)} classes "
            f"the smallest client had at most {best} items in {attempt} draws, min_size="
            f"{self.min_size}; raise alpha, lower min_size or use fewer clients"
        )


def _draw(
    classes: list[Units], clients: int, alpha: float, rng: np.random.Generator, *, capped: bool
) -> tuple[Indices, Indices]:
    """One draw of the class x client table of numbers of units, and the items that each client holds then."""
    cap = sum(units.items for units in classes) / clients if capped else np.inf
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
    """Client k holds all items of the k-th most frequent class, such as ``of: [country]``; rare classes are merged.

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
            raise ConfigError(
                f"partition 'natural': {clients} clients, but the items are of {len(classes)} classes; "
                f"use at most {len(classes)} clients, or more columns under 'of'"
            )
        holder = _holders(np.bincount(class_index, weights=units.sizes).astype(np.int64), clients)
        parts = [rng.permutation(np.flatnonzero(holder[class_index] == client)) for client in range(clients)]
        sizes = [int(units.sizes[part].sum()) for part in parts]
        if min(sizes) < self.min_size:
            raise ConfigError(
                f"partition 'natural': min_size={self.min_size}, but {len(sizes)} clients would hold {sizes} items; "
                "lower min_size or use fewer clients"
            )
        return parts


def _holders(sizes: Indices, clients: int) -> Indices:
    """The client of each class, given the classes' numbers of items."""
    holder = np.zeros(len(sizes), dtype=np.int64)
    held = np.zeros(clients, dtype=np.int64)
    for rank, label in enumerate(np.argsort(-sizes, kind="stable")):
        # the last of several clients that hold least
        client = rank if rank < clients else clients - 1 - int(held[::-1].argmin())
        holder[label] = client
        held[client] += sizes[label]
    return holder
