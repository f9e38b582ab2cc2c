"""Attackers in simulations: a site whose clients may attack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from polyfed.core.randomness import generator
from polyfed.data.samples import Samples
from polyfed.engines.outgoing import Performing
from polyfed.engines.site import Site
from polyfed.federation.attack import Attack, attacks_by_client
from polyfed.federation.attacks import CorruptedUpdate
from polyfed.federation.filters import Filter, Reply
from polyfed.federation.membership import Member


@dataclass
class AttackingSite(Site):
    """Hosts clients as a site does; attackers train on false data, or falsify their replies."""

    may_attack: ClassVar[bool] = True

    @cached_property
    def _attacks(self) -> dict[str, Attack]:
        return attacks_by_client(self.spec.attackers, self.infos, self.spec.seed)

    @cached_property
    def filters(self) -> Sequence[Filter[Performing]]:
        """Attackers first: falsified replies are clipped and get noise like all others."""
        return (self._falsified, *super().filters)

    def _falsified(self, replies: Iterator[Reply], ask: Performing) -> Iterator[Reply]:
        request, attack = ask.request, self._attacks.get(ask.member.id)
        for reply in replies:
            if isinstance(attack, CorruptedUpdate):
                stream = generator(self.spec.seed, "attack", request.client, request.step, request.round, request.phase)
                reply.payload = attack.falsified(reply.payload, ask.received, stream)
            yield reply

    def train_of(self, member: Member) -> Samples:
        """Training samples of a client; an attacker's are poisoned."""
        train, attack = super().train_of(member), self._attacks.get(member.id)
        return train if attack is None else attack.poisoned(train, member)
