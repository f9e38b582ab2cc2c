"""What passes between a server and an engine for one client: a request, and its answer."""

from __future__ import annotations

from dataclasses import dataclass

from polyfed.wire.payload import Payload

StateVersion = tuple[int, int]
"""Round and phase (number of the ask in it) of the step that left a client's state as it is."""


@dataclass(frozen=True)
class Request:
    """What one client is asked to do.

    Attributes:
        client: its id.
        step: name of the client step.
        round, phase: number of the round, from 1, and of the ask in it; together the version of what the client keeps.
        after: version that its last step whose reply the server accepted left, from which it goes on; None: none.
        payload: the step's fields, as they cross the wire.
    """

    client: str
    step: str
    round: int
    phase: int
    after: StateVersion | None
    payload: Payload


@dataclass(frozen=True)
class Answer:
    """An engine's answer for one client: a payload, or what went wrong, in one line and in detail (a traceback)."""

    client: str
    payload: Payload | None = None
    error: str | None = None
    details: str = ""
