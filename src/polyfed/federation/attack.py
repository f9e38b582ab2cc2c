"""Attackers of a simulated federation, to measure protections with; sites import nothing but this base."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator, Field

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings
from polyfed.data.samples import Samples
from polyfed.federation.client import ClientInfo
from polyfed.federation.membership import Member
from polyfed.federation.types import by_architecture

ClientSelection = tuple[str, ...] | int | float


def _named_or_many(value: ClientSelection) -> ClientSelection:
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError("clients are names, a number of each type (whole), or a share of each type (up to 1.0)")
    if isinstance(value, int) and value < 1:
        raise ValueError("clients is 0; leave run.attackers out")
    return value


class Attack(Settings):
    """An attack of some clients of a simulation; a deployment refuses it.

    Attackers attack in every round in which they take part, through their replies to steps; evaluations are honest.
    Subclasses live in ``polyfed.federation.attacks``: they train on false data (``poisoned``) or corrupt what they
    learnt (``CorruptedUpdate``).
    """

    home: ClassVar[str] = "polyfed.federation.attacks"

    clients: Annotated[ClientSelection, AfterValidator(_named_or_many)] = Field(
        default=0.2,
        description="attackers: names, a number of each type, or a share of each (rounded half up), drawn by the seed",
    )
    groups: tuple[str, ...] | None = Field(default=None, min_length=1, description="groups to draw from; None: all")

    @property
    def falsifies(self) -> bool:
        return True

    def attackers(self, infos: Sequence[ClientInfo], seed: int) -> tuple[str, ...]:
        """Ids of the attackers, in client order.

        Raises:
            ConfigError: a name or group is unknown, or no client attacks.
        """
        eligible = self._eligible(infos)
        chosen = set(self._named(eligible) if isinstance(self.clients, tuple) else self._drawn(eligible, seed))
        if not chosen:
            raise ConfigError(f"run.attackers.clients is {self.clients} and selects no client; raise it, or name some")
        return tuple(info.id for info in eligible if info.id in chosen)

    def require_known(self, infos: Sequence[ClientInfo]) -> None:
        """Check that the clients and groups that the settings name exist.

        Raises:
            ConfigError: one does not.
        """
        eligible = self._eligible(infos)
        if isinstance(self.clients, tuple):
            self._named(eligible)

    def _eligible(self, infos: Sequence[ClientInfo]) -> list[ClientInfo]:
        groups = dict.fromkeys(info.group for info in infos)
        for name in set(self.groups or ()) - set(groups):
            raise ConfigError(f"run.attackers.groups: no clients are called '{name}'; {nearest(name, groups)}")
        return [info for info in infos if self.groups is None or info.group in self.groups]

    def _named(self, eligible: Sequence[ClientInfo]) -> tuple[str, ...]:
        assert isinstance(self.clients, tuple)
        names = [info.id for info in eligible]
        for name in set(self.clients) - set(names):
            raise ConfigError(f"run.attackers.clients: no client is called '{name}'; {nearest(name, names)}")
        return self.clients

    def _drawn(self, eligible: Sequence[ClientInfo], seed: int) -> Iterator[str]:
        for members in by_architecture(eligible).values():
            # the order is drawn, not the set: with more attackers, those of before are among them
            order = torch.randperm(len(members), generator=generator(seed, "attackers", members[0].architecture))
            yield from (members[k].id for k in order[: self._number(len(members))].tolist())

    def _number(self, clients: int) -> int:
        assert not isinstance(self.clients, tuple)
        share = self.clients * clients + 0.5 if isinstance(self.clients, float) else self.clients
        return min(int(share), clients)

    def require(self, members: Sequence[Member]) -> None:
        """Check that the attackers can attack like this.

        Args:
            members: the attackers.

        Raises:
            ConfigError: one cannot.
        """

    def poisoned(self, samples: Samples, member: Member) -> Samples:
        """Training samples of an attacker."""
        return samples


def attacks_by_client(attacks: Sequence[Attack], infos: Sequence[ClientInfo], seed: int) -> dict[str, Attack]:
    """Maps attackers to their attacks.

    Raises:
        ConfigError: an attack names unknown clients, or a client is in two.
    """
    by_client: dict[str, Attack] = {}
    for attack in attacks:
        for name in attack.attackers(infos, seed):
            if name in by_client:
                what = f"run.attackers: '{name}' is an attacker of '{by_client[name].component_name()}'"
                raise ConfigError(f"{what} and of '{attack.component_name()}'; keep them apart with groups or names")
            by_client[name] = attack
    return by_client
