"""Label skew by a Dirichlet distribution."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from polyfed.data.partition import Indices, Partition
from polyfed.errors import ConfigError


class Dirichlet(Partition):
    """Each class is shared out in proportions p ~ Dir(alpha), with a cap on the size of a client.

    The routine of Yurochkin et al. (2019) in the form that CreamFL, FedCola and FedAFD use: a client that
    already holds n / clients items gets p = 0 for the classes that follow, p is normalised again, and the
    class is cut at floor(cumsum(p) n_class). All is drawn again until the smallest client has ``min_size``
    items. Because of the cap, a very small alpha does not make sizes arbitrarily unequal.
    """

    alpha: float = Field(default=0.5, gt=0, le=1e6, description="concentration; smaller is more skewed")
    min_size: int = Field(default=10, ge=1, description="items that every client has at least")
    attempts: int = Field(default=1000, ge=1, le=1_000_000, description="draws before giving up on min_size")

    def smallest(self) -> int:
        """``min_size``."""
        return self.min_size

    def needs_labels(self) -> bool:
        """Always."""
        return True

    def assign(self, items: int, labels: Indices | None, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Draw the sizes until they are acceptable, then the items."""
        _, kind, sizes = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
        counts = self._counts(sizes, clients, rng)
        # one class after another, in random order within a class
        order = rng.permutation(items)
        order = order[np.argsort(kind[order], kind="stable")]
        pieces = np.split(order, np.cumsum(counts.ravel())[:-1])
        return [rng.permutation(np.concatenate(pieces[client::clients])) for client in range(clients)]

    def _counts(self, sizes: Indices, clients: int, rng: np.random.Generator) -> Indices:
        """Class x client table of counts, redrawn until every client has ``min_size`` items."""
        best = 0
        for _ in range(self.attempts):
            counts = _draw(sizes, clients, self.alpha, rng)
            best = max(best, int(counts.sum(axis=0).min()))
            if best >= self.min_size:
                return counts
        raise ConfigError(
            f"partition 'dirichlet': with alpha={self.alpha}, {clients} clients and {len(sizes)} classes "
            f"the smallest client had at most {best} items in {self.attempts} draws, min_size="
            f"{self.min_size}; raise alpha, lower min_size or use fewer clients"
        )


def _draw(sizes: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Indices:
    """One draw of the class x client table of counts; rows sum to ``sizes``."""
    cap = sizes.sum() / clients
    held = np.zeros(clients, dtype=np.int64)
    counts = np.zeros((len(sizes), clients), dtype=np.int64)
    for row, size in zip(counts, sizes, strict=True):
        # a Dirichlet draw normalised over the clients below the cap is a Dirichlet draw over just these;
        # drawn so, it cannot come out as 0 / 0 for a tiny alpha
        below = np.flatnonzero(held < cap)
        cuts = np.floor(np.cumsum(rng.dirichlet(np.full(len(below), alpha))) * size).astype(np.int64)
        cuts[-1] = size
        row[below] = np.diff(cuts, prepend=0)
        held += row
    return counts
