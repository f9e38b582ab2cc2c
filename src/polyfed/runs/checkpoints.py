"""Rounds that last: logs, models and checkpoints are written when a round is complete, and read to go on from it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyfed.core.errors import RunError
from polyfed.federation.server import Server
from polyfed.federation.state import StateStore, flatten, unflatten
from polyfed.runs.cohorts import Cohorts, accepted_in
from polyfed.runs.evaluations import Evaluations
from polyfed.runs.events import Callback, Event, Incident, Recorder
from polyfed.runs.folder import Checkpoint, RunFolder
from polyfed.runs.records import SERVER
from polyfed.wire.ledger import Ledger

log = logging.getLogger(__name__)


@dataclass
class Checkpoints:
    """Makes complete rounds durable.

    Attributes:
        folder: of the run.
        server: who is saved.
        cohorts, evaluations: what they know lasts, too.
        recorder: has the records of the round.
        events: are told of checkpoints that cannot be used.
        save_last: saves the server's model.
        states: where clients keep their states if they live here, else None.
    """

    folder: RunFolder
    server: Server
    cohorts: Cohorts
    evaluations: Evaluations
    recorder: Recorder
    events: Callback
    save_last: Callable[[], None]
    states: StateStore | None

    def save(self, number: int, ledger: Ledger, seconds: float | None) -> None:
        """Write a complete round; its checkpoint comes last and makes it count."""
        # a kill may come after any line: resuming cuts the logs back to the sizes in the newest manifest
        self.folder.append("metrics", self.recorder.take())
        self.folder.append("ledger", ledger.records)
        if self.cohorts.keeps_time:
            self.folder.append("pace", self.cohorts.timeline.taken())
        if seconds is not None:
            self.folder.append("timing", [{"round": number, "seconds": round(seconds, 3)}])
        for name, (values, clients) in self.server.arrays.items():
            path = f"arrays/{name}/round-{number:04d}.safetensors"
            self.folder.save_tensors(path, {"values": values}, {"clients": json.dumps(clients)})
        self.save_last()
        self.folder.save_checkpoint(
            Checkpoint(number, flatten(self.server.snapshot()) | self.cohorts.tensors(), self._facts())
        )

    def _facts(self) -> dict[str, Any]:
        return {"logs": self.folder.log_sizes(), **self.evaluations.facts(), **self.cohorts.facts()}

    def restore(self) -> int:
        """Be as after the newest complete round that can be used; gives its number.

        Raises:
            RunError: there is none.
        """
        checkpoint, problems = self.folder.newest_checkpoint(self._problem_of)
        if checkpoint is None:
            reason = "; ".join(problems) or "no round was completed"
            raise RunError(f"'{self.folder.path}' has no usable checkpoint ({reason}); start the run again")
        for problem in problems:
            log.warning("%s; continuing from round %d", problem, checkpoint.round)
            self.events.handle(Incident(checkpoint.round, SERVER, "checkpoint_skipped", problem, is_result=False))
        # logs last: if anything above cannot be restored, nothing on disk has changed
        self.server.restore(checkpoint.round, unflatten(checkpoint.tensors))
        self.evaluations.restore(checkpoint.facts)
        self.cohorts.restore(checkpoint.facts, checkpoint.tensors)
        self.folder.rewind_logs(checkpoint.facts["logs"])
        return checkpoint.round

    def _problem_of(self, checkpoint: Checkpoint) -> str:
        """What is not readable of that round: records, or the state of a client that lives here and keeps anything."""
        if lost := self.folder.lost_records(checkpoint.facts["logs"]):
            return f"after round {checkpoint.round} {lost}"
        client = None if self.states is None else self.states.damaged(accepted_in(checkpoint.facts))
        return "" if client is None else f"the state of client '{client}' is damaged"


class History(Callback):
    """Writes down at once what befell the run, not the federation: it is no part of the run's result.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def handle(self, event: Event) -> None:
        if isinstance(event, Incident) and not event.is_result:
            line = {"round": event.round, "participant": event.participant}
            self._folder.append("history", [{**line, "event": event.incident, "reason": event.reason}])
