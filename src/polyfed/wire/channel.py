"""How requests and answers of a round cross: encoded, carried, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from polyfed.wire.ledger import Direction, Ledger
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload
from polyfed.wire.transport import Transport


@dataclass(frozen=True)
class Channel:
    """Between the server and the clients of a round.

    Attributes:
        exchange: carries messages, as ``Engine.exchange``.
        transport: encoding.
        ledger: where bytes are entered.
        limits: on what clients send.
        purpose: put before the step's name in the ledger.
    """

    exchange: Callable[[Sequence[Request], float | None], Iterator[Answer]]
    transport: Transport
    ledger: Ledger
    limits: Limits = field(default_factory=Limits)
    purpose: str = ""

    def sends(self, request: Request, plain: Payload) -> Request:
        """The request, entered; ``plain`` is its payload before encoding."""
        self._enter(request, "down", request.payload, plain)
        return request

    def decoded(self, request: Request, wire: Payload) -> Payload:
        """What a client's reply says.

        Args:
            request: that it answers.
            wire: the reply as it crossed.

        Raises:
            PayloadError: the reply is damaged, or too large.
        """
        plain = None
        try:
            plain = self.transport.decode(wire, self.limits)
            return plain
        finally:  # what is refused has crossed too
            self._enter(request, "up", wire, plain)

    def dropped(self, request: Request, wire: Payload) -> None:
        """Enter a reply that nobody reads."""
        self._enter(request, "up", wire, None)

    def _enter(self, request: Request, direction: Direction, wire: Payload, plain: Payload | None) -> None:
        self.ledger.enter(request.round, request.client, direction, self.purpose + request.step, wire, plain)
