"""Client steps as coroutines, so that clients which train at the same time can train together."""

from __future__ import annotations

import contextvars
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from polyfed.core.activity import client_started
from polyfed.core.randomness import global_states, set_global_states
from polyfed.data.samples import Batch
from polyfed.engines.site import Site
from polyfed.federation.fitting import Fitting, conducted
from polyfed.federation.packing import Packer
from polyfed.federation.stack import PendingStep
from polyfed.wire.messages import Answer, Request

if TYPE_CHECKING:
    from greenlet import greenlet

_log = logging.getLogger(__name__)

_CLIENTS, _WEIGHTS = 128, 4_000_000  # at a time, if nobody says how many


class _Running:
    """A client's step that is under way, or done."""

    def __init__(self, request: Request, site: Site) -> None:
        self.request, self.site = request, site
        self.coroutine: greenlet
        self.pending: PendingStep | None = None
        self.answer: Answer | None = None
        self.seconds = 0.0


class PackedSteps:
    """Runs the steps of several clients at a time; where they train they wait for each other, see ``Packer``.

    Args:
        site: where the clients live.
        most: clients at a time; None: as many as suit, and only where that is faster.
        answer: runs a client's step at a site.
    """

    def __init__(self, site: Site, most: int | None, answer: Callable[[Site, Request], Answer]) -> None:
        self._most, self._answer = most, answer
        self._packer = Packer(measures=most is None)
        self._site, self._free = site, [site]
        self._architecture = {info.id: info.architecture for info in site.infos}
        self._joins: dict[tuple[str, str], bool] = {}
        self._under_way = deque[_Running]()
        self._current: _Running

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[Answer, float]]:
        """Every client's answer, in order, and the seconds that it took."""
        self._packer.steps.clear()
        try:
            for request in requests:
                joins = self._joins.get(self._kind(request), True)
                if not joins or self._is_full():
                    yield from self._finished()
                if joins:
                    self._begin(request)
                    yield from self._ready()
                else:
                    yield self._alone(request)
            yield from self._finished()
        finally:
            self._abandon()
        if not any(self._joins.values()):
            self._free[:] = [self._site]  # nobody needs the models of the others any more
        if self._packer.steps:
            _log.info("steps of clients: %s", ", ".join(f"{n} {how}" for how, n in self._packer.steps.items()))

    def step(self, fit: Fitting, batch: Batch) -> None:
        """Take a client's step, in its coroutine, with others if that is possible; see ``fitting.Conductor``."""
        running = self._current
        waits = self._packer.enter(fit)
        self._joins[self._kind(running.request)] = self._packer.packs(fit)
        if waits:
            running.pending = PendingStep(fit, batch)
            hub = running.coroutine.parent
            assert hub is not None
            if hub.switch():
                return
        started = time.thread_time()
        fit.step_alone(batch)
        self._packer.took_alone(fit, time.thread_time() - started)

    def leave(self, fit: Fitting) -> None:
        self._packer.leave(fit)

    def _kind(self, request: Request) -> tuple[str, str]:
        return self._architecture.get(request.client, ""), request.step

    def _is_full(self) -> bool:
        if self._most is not None:
            return len(self._under_way) >= self._most
        held = sum(self._packer.weights(running.pending.fit) for running in self._under_way if running.pending)
        return len(self._under_way) >= _CLIENTS or held >= _WEIGHTS

    def _alone(self, request: Request) -> tuple[Answer, float]:
        started = time.monotonic()
        client_started(request.client, request.step)
        return self._answer(self._site, request), time.monotonic() - started

    def _begin(self, request: Request) -> None:
        from greenlet import greenlet

        client_started(request.client, request.step)
        # what is under way at a site needs its model
        running = _Running(request, self._free.pop() if self._free else self._site.twin())

        def run(_: bool) -> None:
            with conducted(self):
                running.answer = self._answer(running.site, request)

        running.coroutine = greenlet(run)
        running.coroutine.gr_context = contextvars.copy_context()
        self._under_way.append(running)
        self._resume(running)

    def _resume(self, running: _Running, taken: bool = False) -> None:
        """Let a client go on until it trains again, or is done."""
        started, outer = time.monotonic(), global_states()
        if running.pending is not None:
            set_global_states(running.pending.random)
        self._current, running.pending = running, None
        try:
            running.coroutine.switch(taken)
        finally:
            set_global_states(outer)
            running.seconds += time.monotonic() - started
        if running.answer is not None:
            self._free.append(running.site)

    def _ready(self) -> Iterator[tuple[Answer, float]]:
        """The answers that need not wait for those of others."""
        while self._under_way and (answer := self._under_way[0].answer) is not None:
            yield answer, self._under_way.popleft().seconds

    def _finished(self) -> Iterator[tuple[Answer, float]]:
        """All answers, once all clients under way are done."""
        while waiting := {one.pending: one for one in self._under_way if one.pending is not None}:
            started = time.monotonic()
            group, taken = self._packer.advance(list(waiting))
            share = (time.monotonic() - started) / len(group)
            for step in group:
                waiting[step].seconds += share
                self._resume(waiting[step], taken)
        yield from self._ready()

    def _abandon(self) -> None:
        outer = global_states()
        for running in self._under_way:
            running.coroutine.throw()
            self._free.append(running.site)
        self._under_way.clear()
        set_global_states(outer)
