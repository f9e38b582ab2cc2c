"""Pace of the server: it steps once all clients have replied, or a number of them; and weights of late replies."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field, SerializeAsAny, field_validator

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings
from polyfed.federation.client import ClientInfo


class Staleness(Settings):
    """s(tau), the weight of a reply of staleness tau: 1 for a fresh one, never more, never less for a fresher one."""

    home: ClassVar[str] = "polyfed.federation.paces"

    @abstractmethod
    def weight(self, tau: int) -> float:
        """s(tau), in (0, 1].

        Args:
            tau: server steps between the model that the client started from and that of now; 0: none.
        """


class ConstantStaleness(Staleness):
    """1: late replies count as others do (Xie et al. 2019, section 5.2)."""

    short_name: ClassVar[str] = "constant"

    def weight(self, tau: int) -> float:
        return 1.0


class Polynomial(Staleness):
    """(1 + tau)^-a (Xie et al. 2019, section 5.2); with a = 1/2 FedBuff's 1 / sqrt(1 + tau) (Nguyen et al. 2022)."""

    short_name: ClassVar[str] = "polynomial"

    a: float = Field(default=0.5, gt=0, le=10, description="exponent")

    def weight(self, tau: int) -> float:
        return float((1.0 + tau) ** -self.a)


class Pace(Settings):
    """Rule by which the server takes a step."""

    home: ClassVar[str] = "polyfed.federation.paces"

    clients: SerializeAsAny[ResponseTimes] | None = Field(
        default=None,
        description="response times of clients in virtual time: drawn; null: one second each. Deployments have a "
        "real clock",
    )

    @abstractmethod
    def require(self, clients: Sequence[ClientInfo]) -> None:
        """Check that the settings suit a run's clients.

        Raises:
            ConfigError: they do not.
        """

    def most(self, everybody: Sequence[ClientInfo]) -> int:
        """Replies after which a round ends."""
        return len(everybody)


class Sync(Pace):
    """A round ends once all clients of its cohort have replied."""

    short_name: ClassVar[str] = "sync"

    def require(self, clients: Sequence[ClientInfo]) -> None:
        return None


class Buffered(Pace):
    """FedBuff (Nguyen et al., AISTATS 2022): the server takes a step after K replies; late ones count in a later round.

    W <- W + mean of s(tau_c) (W_c - W at the version that c started from), the method's own mean. A client starts a
    step once per round at most, with the server's state of then. ``run.sampling`` draws the clients that may be started
    in a round; clients at work go on.
    """

    short_name: ClassVar[str] = "buffered"

    replies: int | float = Field(default=0.5, gt=0, description="K: clients (whole), or a share of all (up to 1.0)")
    staleness: SerializeAsAny[Staleness] = Field(default=Polynomial(), description="weights: polynomial, constant")
    max_staleness: int | None = Field(default=None, ge=0, description="older replies are dropped; null: none is")
    concurrency: int | None = Field(default=None, ge=1, description="most clients at work at a time; null: all")

    @field_validator("replies")
    @classmethod
    def _share(cls, value: int | float) -> int | float:
        if isinstance(value, float) and value > 1:
            raise ValueError("K is a number of clients (whole, from 1), or a share of them (up to 1.0)")
        return value

    def most(self, everybody: Sequence[ClientInfo]) -> int:
        # 0.3 of 10 is 3, although the product is a bit more
        share = self.replies * len(everybody) if isinstance(self.replies, float) else self.replies
        return max(1, math.ceil(share - 1e-9))

    def require(self, clients: Sequence[ClientInfo]) -> None:
        if self.concurrency is not None and self.concurrency > len(clients):
            raise ConfigError(f"run.pace.concurrency is {self.concurrency}, but there are {len(clients)} clients")
        if isinstance(self.replies, int) and self.replies > len(clients):
            raise ConfigError(f"run.pace.replies is {self.replies}, but there are {len(clients)} clients; lower it")


class ResponseTimes(Settings):
    """Response times of the clients of a simulation, so that the order of replies does not depend on the machine."""

    home: ClassVar[str] = "polyfed.federation.paces"

    @abstractmethod
    def of(self, clients: Sequence[ClientInfo], seed: int) -> Mapping[str, float]:
        """Maps clients to the seconds of a step.

        Raises:
            ConfigError: they do not fit these clients.
        """


class SampledResponseTimes(ResponseTimes):
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
        # by client, so that one more or less changes no other's
        speed = float(torch.rand(2, generator=generator(seed, client.id, "times"), dtype=torch.float64)[0])
        seconds: float = self.seconds * self.groups.get(client.group, 1.0) * self.skew**speed
        return seconds
