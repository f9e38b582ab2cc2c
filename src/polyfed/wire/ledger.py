"""The ledger, every byte that crosses between server and clients; and the channel that enters them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import ref

from polyfed.wire.framing import tensor_bytes, wire_size
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload
from polyfed.wire.transport import Transport

Direction = Literal["down", "up"]


@dataclass
class Ledger:
    """Records of one round, one line a bundle; scalars and framing of a message share a line of kind ``framing``."""

    records: list[dict[str, Any]] = field(default_factory=list)
    _last: tuple[ref[Payload], tuple[dict[str, int], int]] | None = None  # a broadcast is measured once

    def enter(
        self,
        round_number: int,
        client: str,
        direction: Direction,
        step: str,
        payload: Payload,
        plain: Payload | None = None,
    ) -> None:
        """Record a message; the lines of a message add up to its exact size in bytes.

        Args:
            round_number: from 1.
            client: client that sent or received it.
            direction: ``down`` to the client, ``up`` from it.
            step: the client step.
            payload: message as it crossed.
            plain: message as it would have crossed in fp32, for the lines' ``full``; None: as it did.
        """
        common = {"round": round_number, "client": client, "direction": direction, "step": step}
        if self._last is None or self._last[0]() is not payload:
            self._last = ref(payload), _sizes(payload)
        sizes, framing = self._last[1]
        if plain is None or all(item is payload.fields.get(name) for name, item in plain.bundles.items()):
            full, full_framing = sizes, framing
        else:
            full, full_framing = _sizes(plain)
        for name, item in payload.bundles.items():
            dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in {dtype for _, dtype, _ in item.specs})
            line = {"bundle": name, "kind": item.label, "dtype": "+".join(dtypes), "bytes": sizes[name]}
            self.records.append(common | line | {"full": full[name]})
        line = {"bundle": "framing", "kind": "framing", "dtype": "", "bytes": framing, "full": full_framing}
        self.records.append(common | line)

    def total(self, direction: Direction) -> int:
        return sum(line["bytes"] for line in self.records if line["direction"] == direction)


def _sizes(payload: Payload) -> tuple[dict[str, int], int]:
    """Bytes of each bundle's tensors, of which one that is named twice crosses once, and of all else."""
    sizes: dict[str, int] = {}
    known = set()
    for name, item in payload.bundles.items():
        sizes[name] = tensor_bytes(item) if item.identity not in known else 0
        known.add(item.identity)
    return sizes, wire_size(payload) - sum(sizes.values())


@dataclass(frozen=True)
class Channel:
    """Channel between the server and the clients of a round.

    Attributes:
        exchange: exchange of the engine.
        transport: encoding of messages.
        ledger: record of bytes.
        limits: bounds of messages from clients.
        purpose: prefix of step names in the ledger.
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
        """Decoded reply of a client, entered.

        Args:
            request: request that it answers.
            wire: the reply as it crossed.
        """
        plain = self.transport.decode(wire)
        self._enter(request, "up", wire, plain)
        return plain

    def dropped(self, request: Request, wire: Payload) -> None:
        """Enter a reply that is not read."""
        self._enter(request, "up", wire, None)

    def refused(self, request: Request, size: int) -> None:
        """Enter the bytes of a reply that cannot be read."""
        about = {"round": request.round, "client": request.client, "direction": "up"}
        about |= {"step": self.purpose + request.step, "bundle": "refused", "kind": "framing", "dtype": ""}
        line = {"bytes": size, "full": size}
        self.ledger.records += [about | line] if size else []

    def _enter(self, request: Request, direction: Direction, wire: Payload, plain: Payload | None) -> None:
        self.ledger.enter(request.round, request.client, direction, self.purpose + request.step, wire, plain)
