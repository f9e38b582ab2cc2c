"""Progress: reported where work is done, shown by whoever listens.

Data, clients and servers report; a display of a run listens as long as ``heard_by`` lasts. Unheard, a report costs
a look at a variable, so workers of other engines report to nobody. No report can change a result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Protocol, TypeVar

_T = TypeVar("_T")
_EVERY = 0.2  # seconds between two reports of one pass


SERVER = "server"
"""What the server is called in records and displays; no client can be called so."""


class Listener(Protocol):
    """Hears of what goes on."""

    def preparing(self, what: str, done: int, total: int) -> None:
        """Data are read or computed: ``done`` of ``total``, 0 if nobody knows how many."""

    def client_started(self, client: str, step: str) -> None:
        """A client begins to work on a step."""

    def working(self, participant: str, what: str, done: int, total: int) -> None:
        """A participant has done ``done`` of ``total`` parts of something, 0 if nobody knows how many."""


class _Audience:
    """A listener, and whether a pass is under way: passes within it are its parts, and not reported."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.occupied = False


_AUDIENCE: ContextVar[_Audience | None] = ContextVar("audience", default=None)


@contextlib.contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Reports within the block, in this thread, go to ``listener``."""
    token = _AUDIENCE.set(_Audience(listener))
    try:
        yield
    finally:
        _AUDIENCE.reset(token)


def client_started(client: str, step: str) -> None:
    if (audience := _AUDIENCE.get()) is not None:
        audience.listener.client_started(client, step)


def at_work(participant: str, what: str) -> None:
    if (audience := _AUDIENCE.get()) is not None:
        audience.listener.working(participant, what, 0, 0)


def preparing(what: str) -> None:
    if (audience := _AUDIENCE.get()) is not None and not audience.occupied:
        audience.listener.preparing(what, 0, 0)


def prepared(what: str, items: Iterable[_T], total: int, *, size: int = 1, before: int = 0) -> Iterator[_T]:
    """The items, reporting how many of ``total`` are ready: ``before`` were, and each counts for ``size``."""
    return _reported(items, lambda to, done: to.preparing(what, min(before + done * size, total), total))


def passed(participant: str, what: str, items: Iterable[_T], total: int, *, before: int = 0) -> Iterator[_T]:
    """The parts of a participant's pass, reporting how many of ``total`` it has done, ``before`` of them earlier."""
    return _reported(items, lambda to, done: to.working(participant, what, min(before + done, total), total))


def _reported(items: Iterable[_T], report: Callable[[Listener, int], None]) -> Iterator[_T]:
    audience = _AUDIENCE.get()
    if audience is None or audience.occupied:
        yield from items
        return
    audience.occupied, last = True, -_EVERY
    try:
        for done, item in enumerate(items):
            if (now := time.monotonic()) - last >= _EVERY:  # nobody reads faster, and reports take time
                last = now
                report(audience.listener, done)
            yield item
    finally:
        audience.occupied = False
