"""Training on private and public batches together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from polyfed.data.samples import Batch

Pair = tuple[Batch | None, Batch | None]
"""The private and the public batch of one optimiser step; either may be missing."""


def interleave(
    private: Iterator[Batch], public: Iterator[Batch], steps: int, wanted: int | None = None
) -> Iterator[Pair]:
    """Spread ``wanted`` public batches evenly over the private batches of an epoch.

    With fewer public than private batches some steps have no public one; with more, there are steps with nothing
    else.

    Args:
        private: the private batches.
        public: public batches without end.
        steps: how many private batches there are.
        wanted: how many public batches; None: as many as private ones.
    """
    wanted = wanted or steps
    given = 0
    for done, batch in enumerate(private, start=1):
        due = -(-wanted * done // steps) - given
        given += due
        yield batch, next(public) if due else None
        yield from ((None, more) for more in islice(public, max(due - 1, 0)))
