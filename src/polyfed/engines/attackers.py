"""Attackers in simulations: a site some of whose clients attack, and an engine whose attackers agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from polyfed.core.randomness import generator
from polyfed.data.samples import Samples
from polyfed.engines.leaving import LeavingFilter, Performing
from polyfed.engines.site import Site
from polyfed.federation.attack import Attack, attacks_by_client
from polyfed.federation.attacks import Conspiracy, FalseUpdate
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Engine
from polyfed.federation.membership import Member
from polyfed.federation.types import by_architecture
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload
from polyfed.wire.schema import StepSchema
from polyfed.wire.transport import Transport


@dataclass
class AttackingSite(Site):
    """Hosts clients as a site does; attackers train on false data, or falsify what they send."""

    may_attack: ClassVar[bool] = True

    @cached_property
    def _attacks(self) -> dict[str, Attack]:
        return attacks_by_client(self.spec.attackers, self.infos, self.spec.seed)

    @cached_property
    def filters(self) -> tuple[LeavingFilter, ...]:
        """Attackers first: what they falsify is clipped and gets noise as everybody's."""
        return (self._falsified, *super().filters)

    def _falsified(self, content: Payload, step: Performing) -> Payload:
        request, attack = step.request, self._attacks.get(step.member.id)
        if not isinstance(attack, FalseUpdate):
            return content
        stream = generator(self.spec.seed, "attack", request.client, request.step, request.round, request.phase)
        return attack.falsified(content, step.received, stream)

    def train_of(self, member: Member) -> Samples:
        """What a client trains on; an attacker's is poisoned."""
        train = super().train_of(member)
        attack = self._attacks.get(member.id)
        if attack is None:
            return train
        split = self.federation.data.split(member.settings.source, member.settings.split)
        return attack.poisoned(train, member, split, self.spec.seed)


@dataclass(frozen=True)
class ColludingEngine:
    """Carries messages as another engine does, and changes what colluding attackers answer.

    Who agrees with others, or knows what they send, waits for them: answers are held until all are there. So it is the
    same on every engine, wherever clients live.

    Attributes:
        engine: where client steps execute.
        attackers: client -> what it does with others.
        steps: the method's client steps.
        transport: encoding on the wire.
        limits: on what clients send.
    """

    engine: Engine
    attackers: Mapping[str, Conspiracy]
    steps: Mapping[str, StepSchema]
    transport: Transport
    limits: Limits

    def clients(self) -> tuple[ClientInfo, ...]:
        return self.engine.clients()

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        """As ``Engine.exchange``."""
        answers = self.engine.exchange(requests, deadline)
        attacked = any(request.client in self.attackers for request in requests)
        if not attacked or self.steps[requests[0].step].kind != "step":
            yield from answers
            return
        held = {answer.client: answer for answer in answers}
        for members in by_architecture(info for info in self.clients() if info.id in held).values():
            held.update(self._agreed([held[info.id] for info in members]))
        for client in list(held):
            yield held.pop(client)

    def _agreed(self, answers: Sequence[Answer]) -> dict[str, Answer]:
        """What the attackers among the clients of a type answer."""
        usable = {answer.client: answer for answer in answers if answer.payload is not None}
        groups: dict[Conspiracy, list[str]] = {}
        for name in filter(self.attackers.get, usable):
            groups.setdefault(self.attackers[name], []).append(name)
        if not groups:
            return {}
        honest = {name: self._plain(answer) for name, answer in usable.items()}
        false: dict[str, Payload] = {}
        for attack, names in groups.items():
            false |= attack.agreed(honest, names)
        return {name: replace(usable[name], payload=self.transport.encode(payload)) for name, payload in false.items()}

    def _plain(self, answer: Answer) -> Payload:
        assert answer.payload is not None
        return self.transport.decode(answer.payload)
