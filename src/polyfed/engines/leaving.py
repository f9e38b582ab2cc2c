"""What a client's reply passes before it leaves its site: one small class for each thing that is done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from polyfed.federation.membership import Member
from polyfed.privacy.accounting import Neighbours, PrivacyCost
from polyfed.privacy.guard import PrivacyGuard
from polyfed.privacy.settings import Budget
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload
from polyfed.wire.schema import StepSchema

if TYPE_CHECKING:  # takes cryptography, which is no part of the base installation
    from polyfed.privacy.masking.identity import SiteIdentity


@dataclass(frozen=True)
class SiteTerms:
    """What a place allows over all its runs; a simulation allows everything.

    Attributes:
        private: folder of the secret, the ledgers of privacy and the answered sums; None: ledgers beside the run's
            folder, sums in it.
        budget: of privacy.
        neighbours: between which data sets it means that.
        measures: whether test metrics may leave.
        is_bounded: whether no round beyond the run's is answered.
        identity: signs keys of masked sums, where sites have keys.
    """

    private: Path | None = None
    budget: Budget | None = None
    neighbours: Neighbours = "replace"
    measures: bool = True
    is_bounded: bool = False
    identity: SiteIdentity | None = None

    @property
    def sums(self) -> Path | None:
        return None if self.private is None else self.private / "sums"


@dataclass
class Performing:
    """A step that a client is asked for.

    Attributes:
        request: to the client.
        received: its payload, decoded.
        schema: of the step.
        member: the client.
        digest: of the request, where it is charged; kept with what a protected client keeps.
        cost: of its reply in privacy, if anything.
    """

    request: Request
    received: Payload
    schema: StepSchema
    member: Member
    digest: bytes = b""
    cost: PrivacyCost | None = None


class LeavingFilter(Protocol):
    """Passes on what a step returned, as it is or changed."""

    def __call__(self, content: Payload, step: Performing) -> Payload: ...


@dataclass(frozen=True)
class Noised:
    """Clips a protected client's reply and adds noise to it, in a step that is charged.

    Attributes:
        guard: keeps account.
        samples: client -> its training samples, a number that is public.
    """

    guard: PrivacyGuard
    samples: dict[str, int]

    def __call__(self, content: Payload, step: Performing) -> Payload:
        samples = self.samples[step.member.id]
        return self.guard.release(step.request, step.digest, content, step.received, step.cost, samples)
