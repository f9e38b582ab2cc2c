"""Label skew by a Dirichlet distribution."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from polyfed.core.errors import ConfigError
from polyfed.data.item_classes import Indices
from polyfed.partitions.partition import Partition
from polyfed.partitions.units import Units

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
        _, kind, number = np.unique(np.asarray(units.labels), return_inverse=True, return_counts=True)
        # where groups can be cut depends on their order; that of single items is drawn when their counts are known
        order = np.arange(len(units)) if units.are_items else rng.permutation(len(units))
        order = order[np.argsort(kind[order], kind="stable")]
        counts = self._counts(np.split(units.sizes[order], np.cumsum(number)[:-1]), clients, rng)
        if units.are_items:
            order = rng.permutation(len(units))
            order = order[np.argsort(kind[order], kind="stable")]
        # one class after another, in random order within a class
        pieces = np.split(order, np.cumsum(counts.ravel())[:-1])
        return [rng.permutation(np.concatenate(pieces[client::clients])) for client in range(clients)]

    def _counts(self, sizes: list[Indices], clients: int, rng: np.random.Generator) -> Indices:
        """Class x client table of numbers of units, redrawn until every client has ``min_size`` items."""
        if (items := sum(int(each.sum()) for each in sizes)) < clients * self.min_size:
            raise ConfigError(
                f"partition 'dirichlet': {items} items are too few for {clients} clients of min_size={self.min_size}; "
                "lower min_size or use fewer clients"
            )
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
