"""When the server takes a step: once all that it asked have replied, or before; and what late replies count for."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field, SerializeAsAny, field_validator

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.federation.client import ClientInfo
from polyfed.federation.times import Times


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
    """When the server takes a step."""

    home: ClassVar[str] = "polyfed.federation.paces"

    clients: SerializeAsAny[Times] | None = Field(
        default=None,
        description="how long clients take in virtual time: drawn; null: one second each. Deployments have a "
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


class LatePace(Pace):
    """A round ends before all have replied; who has not counts in a later one, with less weight.

    A client starts a step once a round at most, with what the server has then. ``run.sampling`` says who may be started
    in a round; who is at work already goes on.
    """

    onto_now: ClassVar[bool] = False
    """Whether trained weights are mixed with the model of now, in place of adding what they changed of their own."""

    staleness: SerializeAsAny[Staleness] = Field(
        default=Polynomial(), description="weight of a late reply by its staleness: polynomial, constant"
    )
    max_staleness: int | None = Field(
        default=None, ge=0, description="replies that are more server steps old are dropped and counted; null: none"
    )
    concurrency: int | None = Field(
        default=None, ge=1, description="clients at work at a time, at most; null: all that may be started"
    )

    def mixing(self, tau: int) -> float:
        """How far the server follows a reply of staleness tau, in (0, 1]."""
        return self.staleness.weight(tau)

    def require(self, clients: Sequence[ClientInfo]) -> None:
        if self.concurrency is not None and self.concurrency > len(clients):
            raise ConfigError(f"run.pace.concurrency is {self.concurrency}, but there are {len(clients)} clients")


class Buffered(LatePace):
    """FedBuff (Nguyen et al., AISTATS 2022): the server takes a step after K replies.

    W <- W + mean of s(tau_c) (W_c - W at the version that c started from), the method's own mean.
    """

    short_name: ClassVar[str] = "buffered"

    replies: int | float = Field(
        default=0.5, gt=0, description="K: a number of clients, or a share of all (a fraction, at most 1.0)"
    )

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
        super().require(clients)
        if isinstance(self.replies, int) and self.replies > len(clients):
            raise ConfigError(f"run.pace.replies is {self.replies}, but there are {len(clients)} clients; lower it")


class Asynchronous(LatePace):
    """FedAsync (Xie, Koyejo, Gupta 2019): every reply is a server step, W <- (1 - a) W + a W_c, a = alpha s(tau)."""

    short_name: ClassVar[str] = "async"
    onto_now: ClassVar[bool] = True

    alpha: float = Field(default=0.6, gt=0, le=1, description="mixing weight of a fresh reply")

    def most(self, everybody: Sequence[ClientInfo]) -> int:
        return 1

    def mixing(self, tau: int) -> float:
        return self.alpha * self.staleness.weight(tau)
