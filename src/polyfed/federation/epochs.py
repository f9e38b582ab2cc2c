"""The one place where the epochs of training loops are counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import NamedTuple


class Epoch(NamedTuple):
    """A pass of a training loop."""

    number: int
    """From 0."""
    of: int
    """How many passes the loop has."""
    once: bool = False
    """Whether the loop runs once in a run, before a participant's first round, at the initial rates of schedules."""


class Epochs:
    """Counts the passes of a participant's training loops; all its trainers take their rates from here.

    A step outside a loop over epochs is refused, so that no method can leave a schedule by epochs out.
    """

    def __init__(self) -> None:
        self.current: Epoch | None = None
        """None outside of loops."""

    def through(self, epochs: int, *, once: bool = False) -> Iterator[int]:
        """The passes of one loop, from 0; every loop counts its own."""
        return self._counted(Epoch(epoch, epochs, once) for epoch in range(epochs))

    def as_one(self) -> Iterator[int]:
        """Passes without end, from 0, of a loop over a number of batches: a schedule counts them as one epoch."""
        return self._counted(repeat(Epoch(0, 1)))

    @property
    def now(self) -> Epoch:
        """The current epoch.

        Raises:
            RuntimeError: no loop over epochs is under way.
        """
        if self.current is None:
            raise RuntimeError(
                "a trainer steps only within an epoch: loop with 'for epoch in participant.epochs(number)'"
            )
        return self.current

    def _counted(self, epochs: Iterable[Epoch]) -> Iterator[int]:
        before = self.current
        try:
            for number, self.current in enumerate(epochs):
                yield number
        finally:  # also where the loop is left early
            self.current = before
