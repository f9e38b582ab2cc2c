"""Masked sums in rounds that end before all have replied: fixed groups of clients that are asked together.

Masks cancel among those whose replies are summed, so who that is must be settled before anybody makes masks. A group
has the masks of one ask among its members and with nobody else, and one staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort, CohortListener, ReplyPolicy
from polyfed.federation.filters import Received
from polyfed.federation.secure_ask import SecureAsk, SecureSums
from polyfed.federation.types import by_architecture
from polyfed.wire.channel import Channel
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Request


def mask_groups(clients: Sequence[ClientInfo], size: int) -> list[tuple[ClientInfo, ...]]:
    """As many groups of ``size`` clients or more as there can be, among which each type is dealt out evenly.

    They are the same in all rounds, so that no client can be told from two overlapping sums.
    """
    count = max(1, len(clients) // size)
    by_type = [client for members in by_architecture(clients).values() for client in members]
    groups = [set(by_type[k::count]) for k in range(count)]
    return [tuple(client for client in clients if client in group) for group in groups]


@dataclass
class GroupSum(CohortListener):
    """What came of asking a group.

    Attributes:
        received: the mean of each type, from each client that is in it.
        outcomes: client, and why it is out of the sum if it is, in a line and in detail; in the order of their answers.
        missing: client -> in which step it failed, and why.
        ledger: what crossed.
    """

    received: list[Received] = field(default_factory=list)
    outcomes: list[tuple[ClientInfo, str | None, str]] = field(default_factory=list)
    missing: dict[str, tuple[str, str]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)

    def answered(self, client: ClientInfo, step: str) -> None:
        self.outcomes.append((client, None, ""))

    def excluded(self, client: ClientInfo, reason: str, details: str) -> None:
        self.outcomes.append((client, reason, details))


@dataclass(frozen=True)
class GroupSums:
    """Asks groups, from keys to the sum, as a round that waits asks all; of the run it changes nothing.

    Attributes:
        sums: what is summed, and how.
        channel: to the clients; what crosses is entered in each sum's own ledger.
        reply_policy: step -> deadline.
        clients: of the run.
    """

    sums: SecureSums
    channel: Channel
    reply_policy: Callable[[str], ReplyPolicy]
    clients: Sequence[ClientInfo]

    def __call__(self, requests: Sequence[Request]) -> GroupSum:
        """The sum of a group's replies.

        Args:
            requests: to its members, all in one round, before they are encoded.

        Raises:
            ExchangeError: of a type too few are left.
        """
        result, sent = GroupSum(), {request.client: request.payload for request in requests}
        cohort = Cohort(
            clients=tuple(client for client in self.clients if client.id in sent),
            round=requests[0].round,
            channel=replace(self.channel, ledger=result.ledger),
            reply_policy=self.reply_policy,
            accepted={request.client: request.after for request in requests if request.after is not None},
            listener=result,
        )
        ask = SecureAsk(self.sums, cohort, requests[0].step, requests[0].phase, cohort.drop)
        result.received += ask.replies(sent)
        result.missing |= ask.missing
        return result
