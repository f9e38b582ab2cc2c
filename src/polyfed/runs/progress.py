"""What a run tells while it goes on, and whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

Metrics = Mapping[str, float]

Reporter = Callable[[Path, bool], "RenderableType"]
"""Reports a run that has ended: its folder, and whether with plots -> what a terminal shows of it."""


class Progress:
    """Is told what happens in a run. This class shows nothing; subclasses override what they show."""

    def preparing(self, what: str, done: int, total: int) -> None:
        """Data are read or computed, ``done`` of ``total`` (0: nobody knows); before a run begins, or while it runs."""

    def run_started(self, name: str, rounds: int, clients: int, *, done: int = 0) -> None:
        """A run of ``rounds`` rounds begins; ``done`` of them were done before it was resumed."""

    def round_started(self, round_number: int, cohort: Sequence[str]) -> None:
        """A round begins with the clients of ``cohort``."""

    def step_started(self, step: str, clients: Sequence[str]) -> None:
        """The server has asked some clients, not all of the cohort always, to perform a step."""

    def client_started(self, client: str, step: str) -> None:
        """A client begins to work on a step."""

    def working(self, participant: str, what: str, done: int, total: int) -> None:
        """A client or the server has done ``done`` of ``total`` parts of something (0: nobody knows how many)."""

    def client_done(self, client: str, step: str, seconds: float) -> None:
        """A client has answered a step of the round."""

    def event(self, round_number: int, participant: str, event: str, reason: str) -> None:
        """Something noteworthy happened, such as the exclusion of a client."""

    def evaluated(self, round_number: int, participant: str, kind: str, metrics: Metrics) -> None:
        """A participant was measured."""

    def traffic(self, round_number: int, up: int, down: int) -> None:
        """Bytes that crossed the wire in a round, told before it is finished."""

    def round_finished(self, round_number: int, seconds: float) -> None:
        """A round is complete and on disk."""

    def run_finished(self, summary: RenderableType) -> None:
        """The run has ended; ``summary`` is its report."""

    def happened_at(self, when: float) -> None:
        """What is told next happened at this time (seconds since 1970); only replays tell it."""

    def close(self) -> None:
        """The run is left, finished or not; may be called more than once."""


class SilentProgress(Progress):
    """Shows nothing."""


def unreported(folder: Path, plots: bool) -> RenderableType:
    """Writes no report."""
    return f"{folder}"
