"""When the server takes a step: once all that it asked have replied, or before; and what late replies count for."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from polyfed.core.effects import require_default
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.federation.client import ClientInfo
from polyfed.federation.staleness import Polynomial, Staleness
from polyfed.federation.times import Times


class Pace(Settings):
    """When the server takes a step."""

    home: ClassVar[str] = "polyfed.federation.paces"

    clients: SerializeAsAny[Times] | None = Field(
        default=None,
        description="how long clients take in virtual time: drawn, trace; null: one second each. Deployments have a "
        "real clock",
    )

    @abstractmethod
    def require(self, clients: Sequence[ClientInfo]) -> None:
        """Check that the settings suit a run's clients.

        Raises:
            ConfigError: they do not.
        """

    def most(self, everybody: Sequence[ClientInfo]) -> int:
        """Replies of a round, at most."""
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
        default=Polynomial(), description="weight of a late reply by its staleness: polynomial, hinge, constant"
    )
    max_staleness: int | None = Field(
        default=None, ge=0, description="replies that are more server steps old are dropped and counted; null: none"
    )
    concurrency: int | None = Field(
        default=None, ge=1, description="clients at work at a time, at most; null: all that may be started"
    )
    replay: Path | None = Field(
        default=None, description="pace.jsonl of a run, such as a deployment's: replies come when they came there"
    )

    @model_validator(mode="after")
    def _one_time(self) -> Self:
        if self.replay is not None:
            require_default(self, "with replay", "clients")
        return self

    @abstractmethod
    def is_full(self, replied: Sequence[ClientInfo], everybody: Sequence[ClientInfo]) -> bool:
        """Whether the server waits for no more replies than these in a round."""

    def fewest(self, kind: Sequence[ClientInfo], everybody: Sequence[ClientInfo]) -> int:
        """Replies of these clients in a round, at least, as long as enough are at work."""
        return 1 if len(kind) == len(everybody) else 0

    def limit(self, opened: float) -> float:
        """When a round that was opened at that time ends if somebody has replied, full or not."""
        return math.inf

    def mixing(self, tau: int) -> float:
        """How far the server follows a reply of staleness tau, in (0, 1]."""
        return self.staleness.weight(tau)

    @property
    def no_groups(self) -> str | None:
        """Why a round's replies cannot be those of one fixed group, in words; None: they can, of ``most`` or more."""
        return None

    def require(self, clients: Sequence[ClientInfo]) -> None:
        if self.concurrency is not None and self.concurrency > len(clients):
            raise ConfigError(f"run.pace.concurrency is {self.concurrency}, but there are {len(clients)} clients")


class Buffered(LatePace):
    """FedBuff (Nguyen et al., AISTATS 2022): the server takes a step after K replies.

    W <- W + mean of s(tau_c) (W_c - W at the version that c started from), the method's own mean. K by modality: once
    so many clients of each have replied, with all that have by then, so that a modality whose clients are slow counts.
    """

    short_name: ClassVar[str] = "buffered"

    replies: int | float | dict[str, Annotated[int, Field(ge=1)]] = Field(
        default=0.5, description="K: a number, a share of all clients (fraction, at most 1.0), or a number by modality"
    )

    @field_validator("replies")
    @classmethod
    def _positive(cls, value: int | float | dict[str, int]) -> int | float | dict[str, int]:
        if value == {} or (not isinstance(value, dict) and not value > 0) or (isinstance(value, float) and value > 1):
            raise ValueError("K is a number of clients (whole, from 1), a share of them (up to 1.0), or by modality")
        return value

    def is_full(self, replied: Sequence[ClientInfo], everybody: Sequence[ClientInfo]) -> bool:
        if isinstance(self.replies, dict):
            return all(_with(name, replied) >= needed for name, needed in self.replies.items())
        return len(replied) >= self.most(everybody)

    def most(self, everybody: Sequence[ClientInfo]) -> int:
        if isinstance(self.replies, dict):  # however many of one modality come before enough of another
            return len(everybody)
        # 0.3 of 10 is 3, although the product is a bit more
        share = self.replies * len(everybody) if isinstance(self.replies, float) else self.replies
        return max(1, math.ceil(share - 1e-9))

    def fewest(self, kind: Sequence[ClientInfo], everybody: Sequence[ClientInfo]) -> int:
        others = [client for client in everybody if client not in kind]
        if isinstance(self.replies, dict):
            return max(0, *(needed - _with(name, others) for name, needed in self.replies.items()))
        return max(0, self.most(everybody) - len(others))

    @property
    def no_groups(self) -> str | None:
        return (
            "run.pace.replies by modality is none; give a number or a share" if isinstance(self.replies, dict) else None
        )

    def require(self, clients: Sequence[ClientInfo]) -> None:
        super().require(clients)
        numbers = self.replies if isinstance(self.replies, dict) else {}
        for name, needed in numbers.items():
            if _with(name, clients) < needed:
                valid = ", ".join(f"{one}: {_with(one, clients)}" for one in sorted({*_modalities(clients)}))
                raise ConfigError(f"run.pace.replies.{name} is {needed}; of each modality there are clients: {valid}")
        if isinstance(self.replies, int) and self.replies > len(clients):
            raise ConfigError(f"run.pace.replies is {self.replies}, but there are {len(clients)} clients; lower it")


class Asynchronous(LatePace):
    """FedAsync (Xie, Koyejo, Gupta 2019): every reply is a server step, W <- (1 - a) W + a W_c, a = alpha s(tau)."""

    short_name: ClassVar[str] = "async"
    onto_now: ClassVar[bool] = True

    alpha: float = Field(default=0.6, gt=0, le=1, description="mixing weight of a fresh reply")

    def is_full(self, replied: Sequence[ClientInfo], everybody: Sequence[ClientInfo]) -> bool:
        return len(replied) > 0

    def most(self, everybody: Sequence[ClientInfo]) -> int:
        return 1

    def mixing(self, tau: int) -> float:
        return self.alpha * self.staleness.weight(tau)

    @property
    def no_groups(self) -> str | None:
        return "a sum of one reply hides nothing; set run.pace to buffered"


class Deadline(LatePace):
    """Semi-synchronous: a round ends after so many seconds, at the first reply at the earliest; later replies count in
    the next round, as ``buffered`` counts late ones."""

    short_name: ClassVar[str] = "deadline"

    seconds: float = Field(gt=0, description="of a round: virtual ones, in a deployment real ones")

    def is_full(self, replied: Sequence[ClientInfo], everybody: Sequence[ClientInfo]) -> bool:
        return False

    def limit(self, opened: float) -> float:
        return opened + self.seconds

    @property
    def no_groups(self) -> str | None:
        return "who is late has masks of a sum that is over; set run.pace to buffered, or to sync with run.deadline"


def _with(modality: str, clients: Sequence[ClientInfo]) -> int:
    return sum(modality in client.modalities for client in clients)


def _modalities(clients: Sequence[ClientInfo]) -> list[str]:
    return [name for client in clients for name in client.modalities]
