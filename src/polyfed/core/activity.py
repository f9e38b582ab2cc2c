"""One typed stream of events: reported where work is done, followed by callbacks.

Data, clients and servers report; a run follows as long as ``heard_by`` lasts. Without a follower a report costs a look
at a variable. No report can change a result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")
_EVERY = 0.2  # seconds between two reports of one pass

SERVER = "server"
"""Name of the server in records and displays; clients cannot have it."""


@dataclass(frozen=True)
class Event:
    """An event of a run."""


@dataclass(frozen=True)
class Preparing(Event):
    """Data are read or computed, ``done`` of ``total`` (0: unknown); before a run begins, or during it."""

    what: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class ClientStarted(Event):
    """A client begins to work on a step."""

    client: str
    step: str


@dataclass(frozen=True)
class Working(Event):
    """A client or the server has done ``done`` of ``total`` parts of its work (0: unknown)."""

    participant: str
    what: str
    done: int = 0
    total: int = 0


class Callback:
    """Follows a run. This class does nothing; subclasses handle the events that concern them."""

    def handle(self, event: Event) -> None:
        """Take note of an event; called in the order in which events happen."""

    def happened_at(self, when: float) -> None:
        """Time of the next event, seconds since 1970; called by replays alone."""

    def close(self) -> None:
        """The run is left, finished or not; called by the owner of the callback, perhaps more than once."""


class _Audience:
    """A callback, and whether a pass is under way: passes within it are its parts, and not reported."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self.occupied = False


_AUDIENCE: ContextVar[_Audience | None] = ContextVar("audience", default=None)


@contextlib.contextmanager
def heard_by(callback: Callback) -> Iterator[None]:
    """Reports within the block, in this thread, go to ``callback``."""
    token = _AUDIENCE.set(_Audience(callback))
    try:
        yield
    finally:
        _AUDIENCE.reset(token)


def report(event: Event) -> None:
    if (audience := _AUDIENCE.get()) is not None:
        audience.callback.handle(event)


def preparing(what: str) -> None:
    if (audience := _AUDIENCE.get()) is not None and not audience.occupied:
        audience.callback.handle(Preparing(what))


def prepared(what: str, items: Iterable[_T], total: int, *, size: int = 1, before: int = 0) -> Iterator[_T]:
    """The items, reporting how many of ``total`` are ready: ``before`` were, and each counts for ``size``."""
    return _reported(items, lambda done: Preparing(what, min(before + done * size, total), total))


def passed(participant: str, what: str, items: Iterable[_T], total: int, *, before: int = 0) -> Iterator[_T]:
    """The parts of a participant's pass, reporting how many of ``total`` it has done, ``before`` of them earlier."""
    return _reported(items, lambda done: Working(participant, what, min(before + done, total), total))


def _reported(items: Iterable[_T], event_at: Callable[[int], Event]) -> Iterator[_T]:
    audience = _AUDIENCE.get()
    if audience is None or audience.occupied:
        yield from items
        return
    audience.occupied, last = True, -_EVERY
    try:
        for done, item in enumerate(items):
            if (now := time.monotonic()) - last >= _EVERY:  # displays are not read faster, and reports take time
                last = now
                audience.callback.handle(event_at(done))
            yield item
    finally:
        audience.occupied = False
