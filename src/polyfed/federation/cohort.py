"""Cohorts: the clients of a round, and how the server asks them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from polyfed.core.errors import ExchangeError, StepError
from polyfed.federation.client import ClientInfo
from polyfed.federation.filters import Ask, Checks, Expected, Filter, Reply, passed
from polyfed.wire.ledger import Channel
from polyfed.wire.messages import NO_ANSWER, Answer, Cause, Failure, Request, StateVersion
from polyfed.wire.payload import Payload
from polyfed.wire.schema import schema_of

EVALUATING = 90
"""Number of the first ask that measures clients after a round, beyond those of any method."""

Sums = Callable[["Cohort", Ask, int], Iterator[Reply]]
"""Mean of each type in place of the replies of its clients, by cohort, ask and number of the ask."""


class Engine(Protocol):
    """Where client steps execute."""

    def clients(self) -> tuple[ClientInfo, ...]:
        """All clients that can be asked, in client order."""

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        """Carry requests to clients; yield one answer each, in the order of the requests, as they can be consumed.

        Whatever happens on a client, within ``deadline`` seconds, is an answer and never an exception.
        """


@dataclass(frozen=True)
class ReplyPolicy:
    """Quorum and deadline of an ask.

    Attributes:
        min_clients: quorum; fewer usable replies stop the run; a fraction is a share of those asked.
        deadline: seconds that clients have for an answer, or None.
        stopped_by: causes of a client's failure that stop the run.
    """

    min_clients: int | float = 1
    deadline: float | None = None
    stopped_by: Collection[Cause] = ()

    def quorum(self, asked: int) -> int:
        """Usable replies that are needed of so many clients."""
        # 0.3 of 10 is 3, although the product is a bit more
        return math.ceil(self.min_clients * asked - 1e-9) if isinstance(self.min_clients, float) else self.min_clients


class CohortListener:
    """Listener to the incidents of a cohort's clients, by default without effect."""

    def asking(self, step: str, clients: Sequence[str]) -> None:
        """Clients are about to be asked."""

    def answered(self, client: ClientInfo, step: str) -> None:
        """A client's answer is accepted."""

    def clipped(self, client: ClientInfo, reason: str) -> None:
        """A client's update was scaled down."""

    def failed(self, client: ClientInfo, failure: Failure) -> None:
        """A client gave no usable reply."""

    def excluded(self, client: ClientInfo, failure: Failure) -> None:
        """A client is out of the round for a failure."""


@dataclass
class Cohort:
    """The clients of one round; a client that fails is out of it until the next round, or stops the run.

    Attributes:
        clients: clients that are still in the round, in client order.
        round: number of the round, from 1.
        channel: channel to the clients.
        reply_policy: quorum and deadline of a step.
        filters: filters that replies pass, in that order.
        secure: sums of replies whose single values the server never sees, by cohort, ask and its number; None: it sees
            replies.
        accepted: client -> version of its state after its last accepted step; carried from round to round.
        listener: receives the incidents of clients.
        type_of: name of a client's type.
        phase: number of the next ask; asks of one round need numbers of their own.
    """

    clients: tuple[ClientInfo, ...]
    round: int
    channel: Channel
    reply_policy: Callable[[str], ReplyPolicy] = lambda step: ReplyPolicy()
    filters: Sequence[Filter[Ask]] = (Checks(),)
    secure: Sums | None = None
    accepted: dict[str, StateVersion] = field(default_factory=dict)
    listener: CohortListener = field(default_factory=CohortListener)
    type_of: Callable[[ClientInfo], str] = attrgetter("architecture")
    phase: int = 0

    def ask(
        self,
        step: Callable[..., Reply],
        *,
        check: Callable[[Reply], None] = lambda reply: None,
        like: Mapping[str, Expected] | None = None,
        changes: Mapping[str, Expected] | None = None,
        **fields: Any,
    ) -> Iterator[Reply]:
        """Ask every client of the cohort to perform a step; yield the usable replies in client order.

        The request is the contract of the reply: a field of it that is also in the request has the same names, shapes
        and types of tensors (of representations, those of the client's modalities). A reply loses its tensors when the
        next is requested, so that one is in memory at a time. With a robust rule, replies come type by type, with what
        stands for the type in place of their own tensors.

        Args:
            step: a method marked with ``client_step``; the client calls it as ``step(client, **fields)``.
            check: method's own check, which raises PayloadError for a reply that must not be used; its sender is
                excluded.
            like: field of the reply -> what it is laid out like, where that is not the field of the request; of
                weights, also what they start from.
            changes: field of the reply that holds changes -> the weights of which it changes some.
            fields: bundles and scalars to send, the same for all or ``each(function of ClientInfo)``.

        Raises:
            StepError: a client's failure is of a cause that stops the run.
            ExchangeError: once all have answered, if fewer replies were usable than the quorum, or of a type than a
                robust rule needs.
        """
        schema = schema_of(step)
        name = schema.name
        phase, self.phase = self.phase, self.phase + 1
        reasons: dict[str, list[str]] = {}  # of clients that failed alike, once

        def drop(client: ClientInfo, failure: Failure) -> None:
            self.listener.failed(client, failure)
            if failure.cause in self.reply_policy(name).stopped_by:
                step = "" if schema.title in failure.text else f", {schema.title}"
                raise StepError(
                    f"round {self.round}: client '{client.id}'{step}: {failure.text} "
                    f"({failure.place or schema.place}; run.on_error: exclude would go on without the client)"
                ) from failure.error
            reasons.setdefault(failure.text, []).append(client.id)
            self.drop(client, failure)

        ask = Ask(
            schema=schema,
            clients=self.clients,
            fields=fields,
            channel=self.channel,
            check=check,
            accept=lambda client: self.accept(client, name, phase if schema.kind == "step" else None),
            clipped=self.listener.clipped,
            drop=drop,
            like=like or {},
            changes=changes or {},
        )
        if self.secure is not None and schema.mean_by is not None:
            replies = self.summed(self.secure, ask, phase)
        else:
            replies = passed(self.replies(ask, phase), self.filters, ask)
        for reply in replies:
            reply.type = self.type_of(reply.sender)
            yield reply
            reply.release()  # before the next client trains
        asked = len(ask.sent)
        usable, needed = asked - sum(map(len, reasons.values())), self.reply_policy(name).quorum(asked)
        if usable < needed:
            failures = "; ".join(f"{', '.join(ids)}: {text}" for text, ids in reasons.items())
            causes = failures or ("no more were waited for" if asked else "no client was asked")
            what = f"round {self.round}: {usable} of {asked} clients gave a usable reply to '{name}'"
            raise ExchangeError(f"{what}, the quorum (run.exchange.min_clients) is {needed} ({causes})")

    def replies(self, ask: Ask, phase: int) -> Iterator[Reply]:
        """Replies of all clients, which are asked now, in client order."""
        # all requests are made first, so that one that cannot be sent stops the round before any client is asked
        ask.sent.update({client.id: ask.now(client) for client in ask.clients})
        ask.requests.update(self.requests(ask, phase, ask.sent))
        self.listener.asking(ask.step, list(ask.sent))
        clients = {client.id: client for client in ask.clients}

        def reply(answer: Answer) -> Reply | None:
            return self.received(ask, clients[answer.client], answer)

        answers = self.channel.exchange(list(ask.requests.values()), self.reply_policy(ask.step).deadline)
        # unlike a loop, map lets go of an answer before it asks for the next
        return filter(None, map(reply, answers))

    def received(self, ask: Ask, client: ClientInfo, answer: Answer) -> Reply | None:
        """A client's reply; one that gave none is out of the round."""
        if answer.payload is not None:
            return Reply.received(answer.payload, client, answer.step_losses)
        ask.channel.refused(ask.requests[client.id], answer.refused_bytes)
        ask.drop(client, answer.failure or NO_ANSWER)
        return None

    def summed(self, sums: Sums, ask: Ask, phase: int) -> Iterator[Reply]:
        """Mean of each type, in place of the replies of its clients."""
        return sums(self, ask, phase)

    def requests(self, ask: Ask, phase: int, sent: dict[str, Payload], word: int | None = None) -> dict[str, Request]:
        """Client -> its request.

        Args:
            ask: request and contract of replies.
            phase: number of the ask in the round.
            sent: client -> its request, before encoding.
            word: bytes of a number, see ``Ask.reply_size``.
        """
        encode = self.channel.transport.encoder()  # what several clients receive is encoded once
        wires = {name: encode(plain) for name, plain in sent.items()}
        sizes = {client.id: ask.reply_size(client, word) for client in ask.clients if client.id in sent}
        at = ask.step, self.round, phase
        requests = {name: Request(name, *at, self.accepted.get(name), own, sizes[name]) for name, own in wires.items()}
        return {name: self.channel.sends(request, sent[name]) for name, request in requests.items()}

    def accept(self, client: ClientInfo, step: str, phase: int | None) -> None:
        """Accept a client's reply; after a step, which has a phase, its state goes on from there."""
        if phase is not None:
            # only now: a step whose reply is refused has never happened
            self.accepted[client.id] = self.version(client, phase)
        self.listener.answered(client, step)

    def drop(self, client: ClientInfo, failure: Failure) -> None:
        """Put a client out of the round: later asks go on without it."""
        self.clients = tuple(other for other in self.clients if other.id != client.id)
        self.listener.excluded(client, failure)

    @property
    def awaited(self) -> set[str]:
        """Ids of clients whose replies may arrive."""
        return {client.id for client in self.clients}

    @property
    def heard(self) -> set[str]:
        """Ids of clients whose replies the round has used."""
        return {client.id for client in self.clients}

    def may_have_changed(self, asked: set[str]) -> set[str]:
        """Ids of clients whose state may have changed in a round that began with those ``asked``."""
        return asked

    def version(self, client: ClientInfo, phase: int) -> StateVersion:
        """Version of a client's state after a step."""
        return self.round, phase
