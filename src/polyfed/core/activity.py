"""Who is at work on what: told where the work is done, heard where it is shown.

Data, clients and servers tell; a run's progress hears them as long as ``heard_by`` lasts. Unheard, telling costs a look
at a variable, so workers of other engines tell nobody. Nothing that is told can change a result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Protocol, TypeVar

_T = TypeVar("_T")
_EVERY = 0.2  # seconds between two tellings of one pass


class Listener(Protocol):
    """Hears what goes on."""

    def preparing(self, what: str, done: int, total: int) -> None:
        """Data are read or computed: ``done`` of ``total``, 0 if nobody knows how many."""

    def client_started(self, client: str, step: str) -> None:
        """A client begins to work on a step."""

    def working(self, participant: str, what: str, done: int, total: int) -> None:
        """A participant has done ``done`` of ``total`` parts of something, 0 if nobody knows how many."""


class _Ear:
    """A listener, and whether a pass is under way: passes within it are its parts, and reported as such."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.occupied = False


_EAR: ContextVar[_Ear | None] = ContextVar("ear", default=None)


@contextlib.contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """What is told within the block, in this thread, is heard by ``listener``."""
    token = _EAR.set(_Ear(listener))
    try:
        yield
    finally:
        _EAR.reset(token)


def client_started(client: str, step: str) -> None:
    """A client begins to work on a step."""
    if (ear := _EAR.get()) is not None:
        ear.listener.client_started(client, step)


def at_work(participant: str, what: str) -> None:
    """A participant begins something whose length nobody knows."""
    if (ear := _EAR.get()) is not None:
        ear.listener.working(participant, what, 0, 0)


def preparing(what: str) -> None:
    """Something is read or computed whose length nobody knows."""
    if (ear := _EAR.get()) is not None and not ear.occupied:
        ear.listener.preparing(what, 0, 0)


def prepared(what: str, items: Iterable[_T], total: int, *, size: int = 1, before: int = 0) -> Iterator[_T]:
    """The items, telling how many of ``total`` are ready: ``before`` were, and each counts for ``size``."""
    if (ear := _EAR.get()) is None or ear.occupied:
        yield from items
        return
    yield from _told(ear, items, lambda done: ear.listener.preparing(what, min(before + done * size, total), total))


def passed(participant: str, what: str, items: Iterable[_T], total: int, *, before: int = 0) -> Iterator[_T]:
    """The parts of a participant's pass, telling how many of ``total`` it has done, ``before`` of them earlier."""
    if (ear := _EAR.get()) is None or ear.occupied:
        yield from items
        return
    yield from _told(ear, items, lambda done: ear.listener.working(participant, what, min(before + done, total), total))


def _told(ear: _Ear, items: Iterable[_T], tell: Callable[[int], None]) -> Iterator[_T]:
    ear.occupied, told = True, -_EVERY
    try:
        for done, item in enumerate(items):
            if (now := time.monotonic()) - told >= _EVERY:
                told = now
                tell(done)
            yield item
    finally:
        ear.occupied = False
