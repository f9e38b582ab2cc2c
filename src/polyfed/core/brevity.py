"""Training cut short where only its time is wanted, and the rest reckoned from what was measured: a forecast's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from polyfed.core.device import finish_queued

_T = TypeVar("_T")
_FEWEST = 3  # parts that a rate is taken from


@dataclass
class Brevity:
    """How long passes may take, and what that leaves out.

    Attributes:
        seconds: of all passes of one name of one participant; each has one part at least.
        left_out: participant -> seconds that the parts which were left out would have taken, less what the very first
            part took in excess, as it makes much ready for all rounds.
    """

    seconds: float
    left_out: dict[str, float] = field(default_factory=dict)
    _first: dict[tuple[str, str], float] = field(default_factory=dict)
    _measured: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    _occupied: bool = False

    def next_round(self) -> None:
        """Forget what was left out and what was made ready so far; the rates hold on."""
        self.left_out.clear()
        self._first.clear()

    def of(
        self, participant: str, what: str, parts: Iterable[_T], total: int, device: torch.device, *, whole: bool
    ) -> Iterator[_T]:
        """The first parts of a pass of ``total``, or the ``whole``; passes within it stay as they are."""
        if self._occupied:
            yield from parts
            return
        self._occupied, done, count, taken, began = True, 0, 0, 0.0, time.perf_counter()
        try:
            for part in parts:
                yield part
                done += 1
                finish_queued(device)
                now = time.perf_counter()
                count, taken = self._known(participant, what, now - began)
                began = now
                if not whole and count >= _FEWEST and taken >= self.seconds:
                    break
        finally:
            self._occupied = False
        if count:
            excess = max(self._first.pop((participant, what), 0.0) - taken / count, 0.0)
            if owed := max(total - done, 0) * taken / count - excess:
                self.left_out[participant] = self.left_out.get(participant, 0.0) + owed

    def _known(self, participant: str, what: str, seconds: float) -> tuple[int, float]:
        """How many parts were measured, and for how long, with one more; the very first makes much ready."""
        key = participant, what
        if key not in self._measured:
            self._first[key], self._measured[key] = seconds, (0, 0.0)
        else:
            count, taken = self._measured[key]
            self._measured[key] = count + 1, taken + seconds
        return self._measured[key]


_BREVITY: ContextVar[Brevity | None] = ContextVar("brevity", default=None)


@contextlib.contextmanager
def cut_short(seconds: float | None) -> Iterator[Brevity]:
    """Training passes within the block, in this thread, end after so many seconds; None: when they end."""
    brevity = Brevity(float("inf") if seconds is None else seconds)
    token = _BREVITY.set(None if seconds is None else brevity)
    try:
        yield brevity
    finally:
        _BREVITY.reset(token)


def shortened(
    participant: str, what: str, parts: Iterable[_T], total: int, device: torch.device, *, whole: bool = False
) -> Iterable[_T]:
    """The parts of a training pass, fewer where it is ``cut_short`` and may be: a ``whole`` one never is."""
    brevity = _BREVITY.get()
    return parts if brevity is None else brevity.of(participant, what, parts, total, device, whole=whole)
