"""What an attacker works with: an opened run, its last round as the server saw it, and a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import NamedTuple

from polyfed.core.errors import ConfigError, nearest
from polyfed.federation.membership import Member
from polyfed.lab.analysis.leakage.candidates import Candidates, candidates_of
from polyfed.lab.analysis.leakage.seen import SeenReply, SeenRound, shown_kind
from polyfed.lab.analysis.simulated import Simulated
from polyfed.models.model import Model
from polyfed.privacy.settings import PrivacySettings
from polyfed.wire.payload import TensorBundle

ATTACKS = ("membership", "words", "pictures", "classes", "canaries")


@dataclass(frozen=True)
class AttackPlan:
    """Which attacks, and how much work they may be.

    Attributes:
        attacks: of ``ATTACKS``.
        clients: attacked one by one at most, of each architecture in turn; classes are told of all.
        samples: members at most, and as many others.
        shadows: shadow models of each attacked client; even, 0: no attack that needs them.
        passes: over the public samples when a surrogate learns what crossed.
        batches: sizes of the batches whose pictures are reconstructed.
        trials: batches of each size and client.
        steps: of a reconstruction.
        canaries: samples of an attacked client that get a random label.
        seed: of all that attacks draw.
    """

    attacks: tuple[str, ...] = ATTACKS
    clients: int = 3
    samples: int = 200
    shadows: int = 8
    passes: int = 60
    batches: tuple[int, ...] = (1, 4)
    trials: int = 2
    steps: int = 300
    canaries: int = 20
    seed: int = 0

    def require_range(self) -> None:
        """Raise ConfigError if an attack does not exist or a number cannot be."""
        for name in self.attacks:
            if name not in ATTACKS:
                raise ConfigError(f"--attacks {name}: {nearest(name, ATTACKS)}")
        if self.shadows % 2 or self.shadows == 2 or self.shadows < 0:
            raise ConfigError(f"--shadows {self.shadows}: give 0, or an even number from 4 on: half see each sample")
        for size in self.batches:
            if not 1 <= size <= 8:
                raise ConfigError(f"--batches {size}: give sizes from 1 to 8; of larger batches nothing is recovered")


class Crossed(NamedTuple):
    """A bundle that crossed: in words, of whom (the first, of a sum), in which reply and field of it."""

    on: str
    member: Member
    seen: SeenReply
    name: str
    bundle: TensorBundle


@dataclass(frozen=True)
class Situation:
    """All that attacks share."""

    opened: Simulated
    seen: SeenRound
    plan: AttackPlan

    @property
    def privacy(self) -> PrivacySettings | None:
        return self.opened.experiment.policy.privacy

    @property
    def is_masked(self) -> bool:
        return self.opened.experiment.aggregation.secure is not None

    @property
    def is_protected(self) -> bool:
        return self.privacy is not None or self.is_masked

    def chosen(self) -> list[SeenReply]:
        by_type: dict[str, list[str]] = defaultdict(list)
        for reply in self.seen.replies:
            kind = self.member(reply.clients[0]).model.architecture
            if reply.clients[0] not in by_type[kind]:
                by_type[kind].append(reply.clients[0])
        turns = [name for name in chain(*zip_longest(*by_type.values())) if name is not None]
        names = turns[: self.plan.clients]
        return [reply for reply in self.seen.replies if reply.is_sum or reply.clients[0] in names]

    def crossed(self) -> Iterator[Crossed]:
        """All bundles of what was chosen."""
        for seen in self.chosen():
            for name, bundle in seen.bundles.items():
                on = f"{shown_kind(name, bundle)} of {seen.who}"
                yield Crossed(on, self.member(seen.clients[0]), seen, name, bundle)

    def member(self, client: str) -> Member:
        return self.opened.federation.members[client]

    def fresh(self, member: Member) -> Model:
        """A client's model with its initial weights, which follow from the run's seed: the server knows them."""
        return self.opened.federation.client_model(member).to(self.opened.run.place)

    def candidates(self, clients: tuple[str, ...]) -> Candidates | str:
        members = [self.member(name) for name in clients]
        federation = self.opened.federation
        return candidates_of(members, federation.train, federation.test, self.plan.samples, self.plan.seed)
