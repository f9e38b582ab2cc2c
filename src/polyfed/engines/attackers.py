"""Attackers in simulations: a site some of whose clients attack."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from polyfed.core.randomness import generator
from polyfed.data.samples import Samples
from polyfed.engines.outgoing import LeavingFilter, Performing
from polyfed.engines.site import Site
from polyfed.federation.attack import Attack, attacks_by_client
from polyfed.federation.attacks import CorruptedUpdate
from polyfed.federation.membership import Member
from polyfed.wire.payload import Payload


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
        if not isinstance(attack, CorruptedUpdate):
            return content
        stream = generator(self.spec.seed, "attack", request.client, request.step, request.round, request.phase)
        return attack.falsified(content, step.received, stream)

    def train_of(self, member: Member) -> Samples:
        """What a client trains on; an attacker's is poisoned."""
        train = super().train_of(member)
        attack = self._attacks.get(member.id)
        return train if attack is None else attack.poisoned(train, member)
