"""Cohorts: the clients of a round, and how the server asks them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from polyfed.aggregation.robust_rule import RobustRule
from polyfed.core.errors import ExchangeError, PayloadError
from polyfed.federation.bounds import Bounds
from polyfed.federation.client import ClientInfo
from polyfed.federation.gate import Arrival, Medians, ReplyGate
from polyfed.federation.robust_replies import RobustReplies
from polyfed.federation.secure_ask import SecureAsk, SecureSums
from polyfed.wire.ledger import Ledger
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer, Request, StateVersion
from polyfed.wire.payload import Payload, Prototypes, Scalar, TensorBundle, Weights
from polyfed.wire.schema import StepSchema, schema_of
from polyfed.wire.transport import Transport

_T = TypeVar("_T")


class Reply:
    """What a client step returns: bundles and scalars by name, read as attributes."""

    def __init__(self, **fields: TensorBundle | Scalar) -> None:
        self.payload = Payload(fields)
        self.client: ClientInfo | None = None

    @classmethod
    def received(cls, payload: Payload, client: ClientInfo) -> Reply:
        """A reply as the server gets it."""
        reply = cls(**payload.fields)
        reply.client = client
        return reply

    @property
    def sender(self) -> ClientInfo:
        """Who sent it."""
        if self.client is None:
            raise ValueError("a reply has a sender only once the server has received it")
        return self.client

    def __getattr__(self, name: str) -> Any:
        try:
            # through __dict__: to ask for ``self.payload`` would end here again if it is not set
            return self.__dict__["payload"].fields[name]
        except KeyError as error:
            raise AttributeError(f"the reply has no field '{name}'") from error


@dataclass(frozen=True)
class each(Generic[_T]):  # noqa: N801 - reads as a word in cohort.ask(..., weights=each(...))
    """A field whose value differs from client to client."""

    of: Callable[[ClientInfo], _T]


Contents = dict[str, tuple[Payload, Payload]]
"""Client -> what it is asked, plain and as it crosses."""


class Engine(Protocol):
    """Where client steps execute."""

    def clients(self) -> tuple[ClientInfo, ...]:
        """Everybody who can be asked, in client order."""

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        """Carry requests to clients; yield one answer each, in the order of the requests, as they can be consumed.

        Whatever happens on a client, within ``deadline`` seconds, is an answer and never an exception.
        """


@dataclass(frozen=True)
class ReplyPolicy:
    """How long and for whom an ask waits.

    Attributes:
        min_clients: quorum; fewer usable replies stop the run; a fraction is a share of those asked.
        deadline: seconds that clients have for an answer, or None.
    """

    min_clients: int | float = 1
    deadline: float | None = None

    def quorum(self, asked: int) -> int:
        """Usable replies that are needed of so many clients."""
        # 0.3 of 10 is 3, although the product is a bit more
        return math.ceil(self.min_clients * asked - 1e-9) if isinstance(self.min_clients, float) else self.min_clients


@dataclass
class Cohort:
    """The clients of one round; a client that fails is out of it until the next round.

    Attributes:
        clients: who is still in, in client order.
        exchange: carries messages, as ``Engine.exchange``; all that a cohort has of its engine.
        round: number of the round, from 1.
        transport: encoding on the wire.
        ledger: where bytes are entered.
        reply_policy: step -> quorum and deadline.
        limits: on what clients send.
        bounds: on what clients send, relative to what the others of their kind send.
        medians: of updates at the last ask of each step, which bound the next; carried from round to round.
        counted: client -> samples that it counts for in averages, where these are fewer than it has.
        reaches: client -> how many times longer than the median its updates may be, as it has more samples.
        across: whether the method averages models of different architectures with each other.
        robust: rule that combines the replies of a type of clients before the method sees them, or None.
        secure: sums of which the server sees nothing but the result, or None.
        folder: where replies wait for each other if they are large; None: where temporary files are.
        accepted: client -> version of its state after its last accepted step; carried from round to round.
        excluded: told of every client that is dropped, with the reason in a line and in detail.
        shortened: told of every client whose update was scaled down, with the reason.
        arrived: told of every client whose answer is there, with the step; it may yet wait, or be refused.
        answered: told of every client whose answer is accepted, with the step.
        asking: told of every ask, with the step and the clients asked.
        purpose: put before the step's name in the ledger.
        first_phase: number of the first ask; asks of one round need numbers of their own.
    """

    clients: tuple[ClientInfo, ...]
    exchange: Callable[[Sequence[Request], float | None], Iterator[Answer]]
    round: int
    transport: Transport
    ledger: Ledger
    reply_policy: Callable[[str], ReplyPolicy] = lambda step: ReplyPolicy()
    limits: Limits = field(default_factory=Limits)
    bounds: Bounds = field(default_factory=Bounds)
    medians: Medians = field(default_factory=dict)
    counted: Mapping[str, int] = field(default_factory=dict)
    reaches: Mapping[str, float] = field(default_factory=dict)
    across: bool = True
    robust: RobustRule | None = None
    secure: SecureSums | None = None
    folder: Path | None = None
    accepted: dict[str, StateVersion] = field(default_factory=dict)
    excluded: Callable[[ClientInfo, str, str], None] = lambda client, reason, details: None
    shortened: Callable[[ClientInfo, str], None] = lambda client, reason: None
    arrived: Callable[[ClientInfo, str], None] = lambda client, step: None
    answered: Callable[[ClientInfo, str], None] = lambda client, step: None
    asking: Callable[[str, Sequence[str]], None] = lambda step, clients: None
    purpose: str = ""
    first_phase: int = 0
    _phase: int = field(default=0, init=False)

    def ask(
        self,
        step: Callable[..., Reply],
        *,
        check: Callable[[Reply], None] = lambda reply: None,
        origins: Mapping[str, Weights | each[Weights]] | None = None,
        changes: Collection[str] = (),
        **fields: Any,
    ) -> Iterator[Reply]:
        """Ask every client of the cohort to perform a step; yield the usable replies in client order.

        An update, that is weights in a reply less what they started from, is bounded by the medians of the cohort. With
        a robust rule, replies come type by type, with what stands for the type in place of their own tensors.

        Args:
            step: a method marked with ``client_step``; the client calls it as ``step(client, **fields)``.
            check: raises PayloadError for a reply that must not be used; its sender is excluded.
            origins: field of the reply -> what its weights start from, where this is not the field of that name that
                is sent; tensors that are in neither start from 0.
            changes: fields of the reply that hold changes of these weights instead of new ones; they are shortened,
                but never refused.
            fields: bundles and scalars to send, the same for all or ``each(function of ClientInfo)``.

        Raises:
            ExchangeError: once all have answered, if fewer replies were usable than the quorum, or of a type than a
                robust rule needs.
        """
        schema, name = schema_of(step), step.__name__
        phase, self._phase = self.first_phase + self._phase, self._phase + 1
        asked, starts = [client.id for client in self.clients], fields | dict(origins or {})

        def origin(client: ClientInfo, field_name: str) -> Mapping[str, Tensor]:
            start = starts.get(field_name)
            start = start.of(client) if isinstance(start, each) else start
            return start if isinstance(start, Weights) else {}

        reply_policy = self.reply_policy(name)
        reasons: list[str] = []

        def drop(client: ClientInfo, reason: str, details: str = "") -> None:
            reasons.append(f"{client.id}: {reason}")
            # later asks of the round go on without it
            self.clients = tuple(other for other in self.clients if other.id != client.id)
            self.excluded(client, reason, details)

        if self.secure is not None and name in self.secure.weights:
            by_samples = self.secure.weights[name] is not None or Prototypes in schema.returns.values()
            secure = SecureAsk(self.secure, self, name, phase, drop, reply_policy.deadline, by_samples)
            replies = self._summed(secure, fields, check)
        else:
            gate = ReplyGate(
                self.bounds, name, self.clients, self.medians, origin, changes, self.folder, self.reaches, self.across
            )
            replies = self._shown(gate, schema, name, phase, fields, check, drop)
        for client, payload in replies:
            yield Reply.received(payload, client)
        usable, needed = len(asked) - len(reasons), reply_policy.quorum(len(asked))
        if usable < needed:
            raise ExchangeError(
                f"round {self.round}: {usable} of {len(asked)} clients gave a usable reply to '{name}', "
                f"the quorum (run.min_clients) is {needed} ({'; '.join(reasons) or 'nobody was asked'})"
            )

    def _shown(
        self,
        gate: ReplyGate,
        schema: StepSchema,
        step: str,
        phase: int,
        fields: Mapping[str, Any],
        check: Callable[[Reply], None],
        drop: Callable[..., None],
    ) -> Iterator[tuple[ClientInfo, Payload]]:
        """Clients' own replies, or with a robust rule what stands for them."""
        requests, deadline = self._requests(step, phase, self._contents(fields)), self.reply_policy(step).deadline
        # all is laid out by now, so what cannot be sent stops the round before anybody is asked
        self.asking(step, [client.id for client in self.clients])
        answers = self.exchange(requests, deadline)
        arrivals = gate.passed(self._arrivals(requests, answers, gate, schema, check, drop))
        replies = self._accepted(arrivals, step, phase if schema.kind == "step" else None, drop)
        if self.robust is not None and schema.kind != "fresh":
            replies = RobustReplies(self.robust, step, self.clients, self.medians, gate.start).combined(replies)
        return replies

    def _summed(
        self, ask: SecureAsk, fields: Mapping[str, Any], check: Callable[[Reply], None]
    ) -> Iterator[tuple[ClientInfo, Payload]]:
        """The mean of each type in place of its clients' replies."""
        self.asking(ask.step, [client.id for client in self.clients])
        requests = ask.requests(fields, each)
        for client, payload in ask.replies(requests, self.exchange(requests, ask.deadline)):
            try:
                payload.require_sound(self.limits)
                check(Reply.received(payload, client))
            except PayloadError as error:
                raise ExchangeError(f"round {self.round}: the sum of '{ask.step}': {error}") from error
            yield client, payload

    def _accepted(
        self, arrivals: Iterator[Arrival], step: str, phase: int | None, drop: Callable[[ClientInfo, str], None]
    ) -> Iterator[tuple[ClientInfo, Payload]]:
        """The replies that pass the gate; of a step, with a phase, they are what happened."""
        for arrival in arrivals:
            client = arrival.client
            if arrival.refused is not None:
                drop(client, arrival.refused)
                continue
            if arrival.shortened is not None:
                self.shortened(client, arrival.shortened)
            if phase is not None:
                # only now: a step whose reply is refused has never happened
                self.accepted[client.id] = (self.round, phase)
            self.answered(client, step)
            yield client, arrival.payload

    def _arrivals(
        self,
        requests: Sequence[Request],
        answers: Iterator[Answer],
        gate: ReplyGate,
        schema: StepSchema,
        check: Callable[[Reply], None],
        drop: Callable[[ClientInfo, str, str], None],
    ) -> Iterator[Arrival]:
        """The replies that are sound in themselves, as they come; the senders of others are dropped."""
        asked, sent = {client.id: client for client in self.clients}, {request.client: request for request in requests}
        # requests as clients received them, where replies are encoded against them
        received = self.transport.decoder(self.limits) if self.transport.refers else lambda wire: None
        for answer in answers:
            client, request = asked[answer.client], sent[answer.client]
            try:
                payload = self._decoded(request, client, answer, received(request.payload))
                schema.require_reply(payload)
                # before ``check``, which may already compute with the tensors
                payload.require_sound(self.limits, partial(gate.start, client))
                payload = self._counting(payload, client)
                check(Reply.received(payload, client))
                arrival = gate.arrival(client, payload)
            except PayloadError as error:
                drop(client, str(error), answer.details)
                continue
            self.arrived(client, request.step)
            yield arrival

    def _contents(self, fields: Mapping[str, Any]) -> Contents:
        encode = self.transport.encoder()
        contents = {}
        for client in self.clients:
            plain = Payload(
                {key: value.of(client) if isinstance(value, each) else value for key, value in fields.items()}
            )
            contents[client.id] = plain, encode(plain)  # what several clients receive is encoded once
        return contents

    def _requests(self, step: str, phase: int, contents: Contents) -> list[Request]:
        made = []
        for client in self.clients:
            plain, wire = contents[client.id]
            self.ledger.enter(self.round, client.id, "down", self.purpose + step, wire, plain)
            made.append(Request(client.id, step, self.round, phase, self.accepted.get(client.id), wire))
        return made

    def _decoded(self, request: Request, client: ClientInfo, answer: Answer, received: Payload | None) -> Payload:
        wire, plain = answer.payload, None
        if wire is None:
            raise PayloadError(answer.error or "no answer")
        try:
            plain = self.transport.decode(wire, received, self.limits)
            return plain
        finally:  # what is refused has crossed too
            self.ledger.enter(self.round, client.id, "up", self.purpose + request.step, wire, plain)

    def _counting(self, payload: Payload, client: ClientInfo) -> Payload:
        """The payload with as many ``num_examples`` as its sender counts for, if it has any.

        Raises:
            PayloadError: it claims more than it joined with.
        """
        examples = payload.scalars.get("num_examples")
        if not isinstance(examples, int | float):
            return payload
        if not 0 <= examples <= client.samples:
            raise PayloadError(f"num_examples is {examples}, the client joined with {client.samples}")
        most = self.counted.get(client.id, client.samples)
        return payload if examples <= most else Payload({**payload.fields, "num_examples": most})
