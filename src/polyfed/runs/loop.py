"""The loop of a run: draw a cohort, do the algorithm's round, evaluate, checkpoint."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.activity import at_work
from polyfed.core.errors import RunError
from polyfed.core.randomness import isolated
from polyfed.federation.attack import attacks_by_client
from polyfed.federation.client import ClientInfo
from polyfed.federation.server import Server
from polyfed.federation.state import StateStore, flatten, unflatten
from polyfed.runs.cohorts import Cohorts, accepted_in
from polyfed.runs.events import Callback, Event, Incident, Measured, Recorder, RoundComplete, RoundStarted, RunStarted
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import LOGS, Checkpoint, RunFolder
from polyfed.runs.records import ATTACKER, SERVER
from polyfed.tasks.scores import TaskScores
from polyfed.wire.ledger import Ledger


@dataclass
class Loop:
    """The rounds of a run; everything else follows the events that it tells of."""

    experiment: Experiment
    folder: RunFolder
    server: Server
    cohorts: Cohorts
    evaluations: Evaluations
    checkpoints: Checkpoints
    events: Callback
    _idle: set[str] = field(default_factory=set)  # the server, once it was told to have made no step

    def start(self) -> None:
        """From the state before training, which is round 0."""
        # round 0 is measured and saved like any other, so that there is always a checkpoint to resume from
        self._announce(0)
        self.evaluations.changed()
        for client in self.server.clients:
            counts = self.server.weight(client)
            if counts < client.samples:
                reason = (
                    f"joined with {client.samples} samples, counts for {counts} in averages (aggregation.clip.weight)"
                )
                self.cohorts.record_incident(0, client.id, "weight_capped", reason)
        self._tell_attackers()
        self.evaluations.measure_server()
        self._complete(0, Ledger(), None)
        self._rounds(1)

    def resume(self) -> None:
        self.folder.mend_history()
        if not self.folder.has_checkpoints():  # killed before the first was complete
            self.folder.rewind_logs(dict.fromkeys(LOGS, 0))  # lines of a round that did not become complete
            self.experiment.algorithm.setup(self.server)
            return self.start()
        done = self.checkpoints.restore()
        self._announce(done)
        return self._rounds(done + 1)

    def _announce(self, done: int) -> None:
        cfg = self.experiment
        self.events.handle(RunStarted(cfg.name, cfg.run.rounds, len(self.server.clients), done))
        if done:
            self.events.handle(Incident(done, SERVER, "resumed", f"after round {done}", is_result=False))

    def _tell_attackers(self) -> None:
        run = self.experiment.run
        for client, attack in attacks_by_client(run.attackers, self.server.clients, run.seed).items():
            self.cohorts.record_incident(
                0, client, ATTACKER, f"is made to attack: {attack.component_name()} (run.attackers)"
            )

    def _rounds(self, first: int) -> None:
        for number in range(first, self.experiment.run.rounds + 1):
            self.round(number)

    def round(self, number: int) -> None:
        """One round, until it is on disk."""
        cfg, started, ledger = self.experiment, time.monotonic(), Ledger()
        self.server.begin(number)
        cohort = self.cohorts.drawn(number, ledger)
        asked = cohort.awaited
        self.events.handle(RoundStarted(number, sorted(asked) if cfg.algorithm.asks_clients else []))
        # draws of the server depend on nothing but seed and round: a resumed round repeats them
        with isolated(cfg.run.seed, number, SERVER):
            cfg.algorithm.round(self.server, cohort)
        self.server.tell_idle(self._idle)
        # a personal model changes only where its client took part; a shared one changes everywhere
        self.evaluations.changed(cohort.may_have_changed(asked) if cfg.algorithm.is_personal else None)
        if number % cfg.run.eval_every == 0 or number == cfg.run.rounds:
            self.evaluations.measure_server()
            self.evaluations.measure_clients(number, ledger)
        self.cohorts.tell_expenses(number)
        self.cohorts.tell_pace(number)
        at_work(SERVER, "saving the round")
        self._complete(number, ledger, time.monotonic() - started)

    def _complete(self, number: int, ledger: Ledger, seconds: float | None) -> None:
        self.cohorts.tell_notices(number)
        self.checkpoints.save(number, ledger, seconds)
        self.events.handle(RoundComplete(number, seconds, ledger.total("up"), ledger.total("down")))


@dataclass
class Evaluations:
    """Measures the server and the clients.

    Attributes:
        experiment: settings of the run.
        server: who is measured, and who asks the clients.
        cohorts: asks them.
        events: are told of each measurement.
        save_best: is called when validation has found a better server model.
        stale: clients that may have changed since they were last measured.
        best: round and score of the best server model; empty before the first validation.
    """

    experiment: Experiment
    server: Server
    cohorts: Cohorts
    events: Callback
    save_best: Callable[[], None]
    stale: set[str] = field(default_factory=set)
    best: dict[str, float] = field(default_factory=dict)

    def changed(self, clients: Iterable[str] | None = None) -> None:
        """These clients' models may have changed; None: all clients'."""
        self.stale |= {client.id for client in self.server.clients} if clients is None else set(clients)

    def measure_server(self) -> None:
        for kind, samples in (("validation", self.server.validation), ("test", self.server.test)):
            if samples is not None and self.server.has_model:
                at_work(SERVER, f"measuring ({kind})")
                metrics, number = self.server.evaluate(samples), self.server.clock.round
                known = metrics.intervals() if kind == "test" and isinstance(metrics, TaskScores) else {}
                self.events.handle(Measured(number, SERVER, kind, metrics, known))
                if kind == "validation":
                    self._select(number, metrics[self.server.task.primary])

    def measure_clients(self, number: int, ledger: Ledger) -> None:
        """On their own test samples, those that may have changed and are not busy; others keep their last figures."""
        clients = tuple(client for client in self.due() if client.id not in self.cohorts.busy)
        if not clients:
            return
        cohort = self.cohorts.evaluating(number, clients, ledger)
        measured = self.experiment.algorithm.evaluate_clients(self.server, cohort)
        for client, metrics in measured.items():
            if metrics:
                self.events.handle(Measured(number, client, "test", dict(metrics)))
        self.stale -= set(measured)

    def due(self) -> tuple[ClientInfo, ...]:
        """Clients to be measured: so many of each type in each group, of these all that may have changed."""
        wanted = self.experiment.run.evaluate_clients
        if wanted is False:
            return ()
        groups: dict[tuple[str, str], list[ClientInfo]] = {}
        for client in self.server.clients:  # groups of one type may be tested on different sources
            groups.setdefault((client.architecture, client.group), []).append(client)
        most = None if wanted is True else wanted  # True is also the number 1
        chosen = [client for alike in groups.values() for client in alike[:most]]
        return tuple(client for client in self.server.clients if client.id in self.stale and client in chosen)

    def _select(self, number: int, score: float) -> None:
        if not self.best or score > self.best["score"]:  # never for NaN; of equals the earliest, which cost least
            self.best = {"round": number, "score": score}
            self.save_best()

    # ---- what a checkpoint keeps

    def facts(self) -> dict[str, Any]:
        return {"stale": sorted(self.stale), "best": self.best}

    def restore(self, facts: Mapping[str, Any]) -> None:
        self.stale, self.best = set(facts["stale"]), dict(facts["best"])


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
        for name, (values, clients) in self.server.diagnostics.arrays.items():
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
