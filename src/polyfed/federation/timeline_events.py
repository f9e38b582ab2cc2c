"""What is written down of a run in time, a line of ``pace.jsonl`` each."""

from __future__ import annotations

from dataclasses import dataclass

OPENED, STARTED, REPLIED, DROPPED, LOST = "opened", "started", "replied", "dropped", "lost"
"""A round began to wait, in real time; a client was asked; its reply counts; its reply is too old; it did not reply, or
what it did was refused."""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """What became, in a round, of what a client was asked in this or an earlier one.

    Attributes:
        round: number of the server step.
        client: its id; of ``opened`` nobody's.
        event: one of those above.
        step: that it was asked to perform; of a masked sum the phase in which it failed.
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
