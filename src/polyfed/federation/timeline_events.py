"""What becomes of what clients are asked, in time; records are read without torch."""

from __future__ import annotations

from dataclasses import dataclass

STARTED, REPLIED, DROPPED, LOST = "started", "replied", "dropped", "lost"
"""A client was asked; its reply counts; its reply is too old; it did not reply, or what it did was refused."""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """What became, in a round, of what a client was asked in this or an earlier one: a line of ``pace.jsonl``.

    Attributes:
        round: number of the server step.
        client: its id.
        event: one of those above.
        step: that it was asked to perform.
        asked: round in which it was asked.
        seconds: since the run began.
        error: why it did not reply, where it did not.
    """

    round: int
    client: str
    event: str
    step: str
    asked: int
    seconds: float
    error: str | None = None
