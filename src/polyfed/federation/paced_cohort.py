"""Cohorts of rounds that end before all have replied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from polyfed.core.randomness import generator
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort
from polyfed.federation.filters import Ask, Received
from polyfed.federation.paces import LatePace
from polyfed.federation.timeline import AtWork, Job, Timeline
from polyfed.federation.timeline_events import DROPPED, LOST, REPLIED
from polyfed.wire.messages import Request, StateVersion


@dataclass(kw_only=True)
class PacedCohort(Cohort):
    """The clients that may be started in a round, and those at work since earlier ones.

    ``ask`` starts who is idle with what the server has now, and yields the replies that come next, late ones as
    ``LateReplies`` makes them. What clients do depends on their requests alone, so that in virtual time a step is
    performed when its reply is due.

    Attributes:
        pace: when the round ends.
        timeline: of the run.
        everybody: all clients, in client order.
        seed: of the run, for the order in which clients are started if not all may be at work.
        replied: whose replies were accepted in this round, in that order.
        versions: client whose reply has come in this round -> what its step leaves of its state.
    """

    pace: LatePace
    timeline: Timeline
    everybody: tuple[ClientInfo, ...]
    seed: int
    replied: list[ClientInfo] = field(default_factory=list)
    versions: dict[str, StateVersion] = field(default_factory=dict)

    def replies(self, ask: Ask, phase: int) -> Iterator[Received]:
        """Start who is idle; what comes until the round is full, or has lasted long enough, or nobody is at work."""
        opened = self.timeline.opens(self.round)
        self.start(ask, phase)
        # as long as replies are refused, more are waited for
        while due := self.due(ask, phase, opened):
            yield from self._replied(ask, due)
        if self.timeline.at_work and math.isfinite(limit := self.pace.limit(opened)):
            self.timeline.pass_to(limit)

    def accept(self, client: ClientInfo, step: str, phase: int | None) -> None:
        self.replied.append(client)
        super().accept(client, step, phase)

    @property
    def awaited(self) -> set[str]:
        return super().awaited | self.timeline.at_work.keys()

    def may_have_changed(self, asked: set[str]) -> set[str]:
        return {client.id for client in self.replied}

    def version(self, client: ClientInfo, phase: int) -> StateVersion:
        return self.versions[client.id]

    # ---- who is started

    def start(self, ask: Ask, phase: int) -> None:
        """Start idle clients, each once a round, as many as may be at work."""
        room = len(self.everybody) if self.pace.concurrency is None else self.pace.concurrency
        busy, started = self.timeline.at_work.keys() | self.versions.keys(), set[str]()
        for group in self._order:
            if busy.isdisjoint(group) and len(self.timeline.at_work) + len(started) + len(group) <= room:
                started.update(group)
        sent = {client.id: ask.now(client) for client in self.clients if client.id in started}
        if not sent:
            return
        self.listener.asking(ask.step, list(sent))
        for name, request in self.requests(ask.step, phase, sent).items():
            self.timeline.start(replace(request, payload=sent[name]))

    @cached_property
    def _order(self) -> list[Sequence[str]]:
        """Who may be started in this round, in the order in which they are while not all may be at work."""
        clients = [client.id for client in self.clients]
        groups = self.timeline.groups or [(name,) for name in clients]
        whole = [group for group in groups if set(clients).issuperset(group)]
        drawn = torch.randperm(len(whole), generator=generator(self.seed, self.round, "started")).tolist()
        return [whole[place] for place in drawn] if self.pace.concurrency else whole

    # ---- whose replies come

    def due(self, ask: Ask, phase: int, opened: float) -> list[AtWork]:
        """Whose replies fill the round, in the order in which these come, and are not too old."""
        due: list[AtWork] = []
        while not self.pace.is_full([*self.replied, *map(self._sender, due)], self.everybody):
            if not self.timeline.is_due:  # nobody is started between two replies that come at one time
                self.start(ask, phase)
            coming = self.timeline.next(self.pace.limit(opened) if due or self.replied else math.inf)
            if coming is None:
                break
            self.timeline.take(coming)
            if self._is_old(coming[0].request):
                self.drop_old(coming)
                continue
            self.versions |= {one.request.client: (one.request.round, one.request.phase) for one in coming}
            due += coming
        return due

    def drop_old(self, job: Job) -> None:
        """Count a reply that is too old: in real time it has crossed, in virtual time it is not even computed."""
        (work,), error = job, None
        if self.timeline.is_real:
            asked = replace(work.request, payload=self.channel.transport.encode(work.request.payload))
            (answer,) = self.channel.exchange([asked], self.reply_policy(asked.step).deadline)
            error = answer.error
            if answer.payload is not None:
                self.channel.dropped(replace(asked, round=self.round), answer.payload)
        self.timeline.note(DROPPED, work.request, self.round, work.ends, error)

    def _is_old(self, request: Request) -> bool:
        most = self.pace.max_staleness
        return most is not None and self.round - request.round > most

    def _sender(self, work: AtWork) -> ClientInfo:
        return self.by_id[work.request.client]

    @cached_property
    def by_id(self) -> dict[str, ClientInfo]:
        return {client.id: client for client in self.everybody}

    def _replied(self, ask: Ask, due: Sequence[AtWork]) -> Iterator[Received]:
        encode = self.channel.transport.encoder()
        work = {self._sender(one): one for one in due}
        for client, one in work.items():
            # bytes of a reply belong to the round in which it comes
            encoded = replace(one.request, payload=encode(one.request.payload))
            ask.sent[client.id], ask.requests[client.id] = one.request.payload, encoded
        asked = {client: ask.requests[client.id] for client in work}
        ask.requests.update({client.id: replace(request, round=self.round) for client, request in asked.items()})
        for reply in self.exchanged(ask.step, asked):
            one, before = work[reply.client], len(self.replied)
            yield replace(reply, staleness=self.round - one.request.round)
            event = REPLIED if len(self.replied) > before else LOST
            self.timeline.note(event, one.request, self.round, one.ends, reply.error)
