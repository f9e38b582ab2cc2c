"""How long clients take for a step: virtual seconds, for simulations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings
from polyfed.federation.client import ClientInfo


class Times(Settings):
    """How long the clients of a simulation take, so that replies have an order that no machine's speed decides."""

    home: ClassVar[str] = "polyfed.federation.times"

    @abstractmethod
    def of(self, clients: Sequence[ClientInfo], seed: int) -> Mapping[str, float]:
        """Client -> seconds that a step takes it.

        Raises:
            ConfigError: they do not fit these clients.
        """


class Drawn(Times):
    """Speeds drawn from the run's seed: the log of a step's time is uniform, from the fastest to ``skew`` times as
    long."""

    short_name: ClassVar[str] = "drawn"

    seconds: float = Field(default=1.0, gt=0, description="virtual seconds of a step of the fastest")
    skew: float = Field(default=1.0, ge=1, description="times as long that a step of the slowest may take")
    groups: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="group -> times as long as drawn that its clients take; 1 for those not named"
    )

    def of(self, clients: Sequence[ClientInfo], seed: int) -> Mapping[str, float]:
        groups = {client.group for client in clients}
        for name in self.groups.keys() - groups:
            raise ConfigError(f"run.pace.clients.groups: no clients are called '{name}'; {nearest(name, groups)}")
        return {client.id: self._of(client, seed) for client in clients}

    def _of(self, client: ClientInfo, seed: int) -> float:
        # by client, so that another one more or less changes nobody's
        speed = float(torch.rand(2, generator=generator(seed, client.id, "times"), dtype=torch.float64)[0])
        seconds: float = self.seconds * self.groups.get(client.group, 1.0) * self.skew**speed
        return seconds
