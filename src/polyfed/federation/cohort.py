"""Cohorts: the clients of a round, and how the server asks them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from pydantic import Field

from polyfed.errors import ConfigError, ExchangeError, PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.federation.ledger import Ledger, Transport
from polyfed.federation.payload import Artefact, Payload, Scalar
from polyfed.settings import Settings

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., "Reply"])


class Reply:
    """What a client step returns: artefacts and scalars by name, read as attributes."""

    def __init__(self, **fields: Artefact | Scalar) -> None:
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
            return self.__dict__["payload"].fields[name]
        except KeyError as error:
            raise AttributeError(f"the reply has no field '{name}'") from error


def client_step(function: F) -> F:
    """Mark a method ``(self, client, **fields) -> Reply`` of an algorithm as a step that the server may ask for."""
    function.__client_step__ = "step"  # type: ignore[attr-defined]
    return function


def client_query(function: F) -> F:
    """Mark a step that changes nothing a client keeps, such as an evaluation."""
    function.__client_step__ = "query"  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class each(Generic[T]):  # noqa: N801 - reads as a word in cohort.ask(..., weights=each(...))
    """A field whose value differs from client to client."""

    of: Callable[[ClientInfo], T]


@dataclass(frozen=True)
class Answer:
    """An engine's answer for one client: a payload, or what went wrong."""

    client: str
    payload: Payload | None = None
    error: str | None = None


class Engine(Protocol):
    """Where client steps execute."""

    def clients(self) -> tuple[ClientInfo, ...]:
        """Everybody who can be asked, in client order."""
        ...

    def exchange(
        self,
        step: str,
        round_number: int,
        phase: int,
        payloads: Mapping[str, Payload],
        deadline: float | None,
    ) -> Iterator[Answer]:
        """Send one payload to each client named; yield one answer each, in client order, as they can be consumed.

        Whatever happens on a client, within ``deadline`` seconds, is an answer and never an exception.
        """
        ...


class SamplingSettings(Settings):
    """Which clients take part in a round."""

    kind: Literal["uniform", "stratified"] = Field(
        default="uniform", description="from all clients together, or a share of every group (at least one)"
    )
    cohort: int | float | None = Field(
        default=None,
        gt=0,
        description="clients a round: a number (integer), a share of each group, at least one (fraction), None: all",
    )

    def draw(self, clients: tuple[ClientInfo, ...], stream: torch.Generator) -> tuple[ClientInfo, ...]:
        """A cohort, without replacement, in client order.

        Raises:
            ConfigError: the cohort is larger than the federation.
        """
        groups: list[tuple[ClientInfo, ...]] = [clients]
        if self.kind == "stratified":
            names = dict.fromkeys(client.group for client in clients)
            groups = [tuple(client for client in clients if client.group == name) for name in names]
        chosen: set[str] = set()
        for group, size in zip(groups, self._sizes([len(group) for group in groups]), strict=True):
            order = torch.randperm(len(group), generator=stream).tolist()
            chosen.update(group[k].id for k in order[:size])
        return tuple(client for client in clients if client.id in chosen)

    def _sizes(self, groups: list[int]) -> list[int]:
        everybody = sum(groups)
        if self.cohort is None or not everybody:
            return groups
        if isinstance(self.cohort, float):
            return [min(max(int(self.cohort * size + 1e-9), 1), size) for size in groups]
        if not len(groups) <= self.cohort <= everybody:
            valid = f"{len(groups)} to {everybody}" if len(groups) > 1 else f"at most {everybody}"
            raise ConfigError(
                f"run.sampling.cohort is {self.cohort}, but there are {everybody} clients in {len(groups)} "
                f"group(s) to draw from; set {valid}"
            )
        return _apportioned(self.cohort, groups)


def _apportioned(total: int, groups: list[int]) -> list[int]:
    """``total`` places for the groups in proportion to their size, by largest remainder, at least one each."""
    exact = [total * size / sum(groups) for size in groups]
    places = [max(int(share), 1) for share in exact]
    while sum(places) != total:
        step = 1 if sum(places) < total else -1
        gaps = [step * (share - place) for share, place in zip(exact, places, strict=True)]
        open_to = [k for k, place in enumerate(places) if (place < groups[k] if step > 0 else place > 1)]
        places[max(open_to, key=lambda k: gaps[k])] += step
    return places


@dataclass
class Cohort:
    """The clients of one round; a client that fails is out of it until the next round.

    Attributes:
        clients: who is still in, in client order.
        exchange: carries messages, as ``Engine.exchange``; all that a cohort has of its engine.
        round: number of the round, from 1.
        transport: encoding on the wire.
        ledger: where bytes are entered.
        min_clients: fewer usable answers to an ask stop the run.
        deadline: seconds that clients have for an answer, or None.
        excluded: told of every client that is dropped, with the reason.
        answered: told of every client that answered, with the step.
        purpose: put before the step's name in the ledger.
        first_phase: number of the first ask; asks of one round need numbers of their own.
    """

    clients: tuple[ClientInfo, ...]
    exchange: Callable[[str, int, int, Mapping[str, Payload], float | None], Iterator[Answer]]
    round: int
    transport: Transport
    ledger: Ledger
    min_clients: int = 1
    deadline: float | None = None
    excluded: Callable[[ClientInfo, str], None] = lambda client, reason: None
    answered: Callable[[ClientInfo, str], None] = lambda client, step: None
    purpose: str = ""
    first_phase: int = 0
    _phase: int = field(default=0, init=False)

    def ask(
        self,
        step: Callable[..., Reply],
        *,
        check: Callable[[Reply], None] = lambda reply: None,
        **fields: Any,
    ) -> Iterator[Reply]:
        """Ask every client of the cohort to perform a step; yield the usable replies in client order.

        Args:
            step: a method marked with ``client_step``; the client calls it as ``step(client, **fields)``.
            check: raises PayloadError for a reply that must not be used; its sender is excluded.
            fields: artefacts and scalars to send, the same for all or ``each(function of ClientInfo)``.

        Raises:
            ExchangeError: once all have answered, if fewer than ``min_clients`` replies were usable.
        """
        phase, self._phase = self.first_phase + self._phase, self._phase + 1
        outgoing = {client.id: self._send(step.__name__, client, fields) for client in self.clients}
        reasons: list[str] = []
        usable = 0
        asked = {client.id: client for client in self.clients}
        for answer in self.exchange(step.__name__, self.round, phase, outgoing, self.deadline):
            client = asked[answer.client]
            reply, reason = self._receive(step.__name__, client, answer, check)
            if reply is None:
                reasons.append(f"{client.id}: {reason}")
                self.clients = tuple(other for other in self.clients if other.id != client.id)
                self.excluded(client, reason)
                continue
            usable += 1
            self.answered(client, step.__name__)
            yield reply
        if usable < self.min_clients:
            raise ExchangeError(
                f"round {self.round}: {usable} of {len(asked)} clients gave a usable reply to '{step.__name__}', "
                f"run.min_clients is {self.min_clients} ({'; '.join(reasons) or 'nobody was asked'})"
            )

    def _send(self, step: str, client: ClientInfo, fields: Mapping[str, Any]) -> Payload:
        content = {name: value.of(client) if isinstance(value, each) else value for name, value in fields.items()}
        wire = self.transport.narrow(Payload(content))
        self.ledger.enter(self.round, client.id, "down", self.purpose + step, wire)
        return self.transport.widen(wire)

    def _receive(
        self, step: str, client: ClientInfo, answer: Answer, check: Callable[[Reply], None]
    ) -> tuple[Reply | None, str]:
        if answer.payload is None:
            return None, answer.error or "no answer"
        wire = self.transport.narrow(answer.payload)
        self.ledger.enter(self.round, client.id, "up", self.purpose + step, wire)
        reply = Reply.received(self.transport.widen(wire), client)
        try:
            reply.payload.require_finite()
            check(reply)
        except (PayloadError, AttributeError) as error:
            return None, str(error)
        return reply, ""
