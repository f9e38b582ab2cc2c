"""The loop of a run: draw a cohort, do the algorithm's round, evaluate, make the round last."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.activity import Working, report
from polyfed.core.errors import RunError
from polyfed.core.randomness import isolated
from polyfed.core.version import __version__
from polyfed.federation.attack import attacks_by_client
from polyfed.federation.client import ClientInfo
from polyfed.federation.server import Server
from polyfed.federation.state import StateStore, flatten, unflatten
from polyfed.runs.cohorts import Cohorts, accepted_in
from polyfed.runs.events import Callback, Incident, Measured, Recorder, RoundComplete, RoundStarted, RunStarted
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import LOGS, Checkpoint, RunFolder
from polyfed.runs.records import ATTACKER, SERVER, best_round
from polyfed.tasks.metrics import TaskScores
from polyfed.wire.ledger import Ledger

log = logging.getLogger(__name__)


@dataclass
class Loop:
    """The rounds of a run; all else follows its events.

    Attributes:
        experiment, folder, server, cohorts: of the run.
        recorder: has the records of the round that goes on.
        events: Followers of the run.
        save_models: saves the run's model under names: ``last``, ``best`` once validation has found a better one.
        states: Store of the states of clients that live here, else None.
        stale: clients that may have changed since they were last measured.
        best: round and score of the best server model; empty until validation has given a number.
    """

    experiment: Experiment
    folder: RunFolder
    server: Server
    cohorts: Cohorts
    recorder: Recorder
    events: Callback
    save_models: Callable[[Sequence[str]], None]
    states: StateStore | None
    stale: set[str] = field(default_factory=set)
    best: dict[str, float] = field(default_factory=dict)
    _idle: set[str] = field(default_factory=set)  # the server, once a warning reported that it made no step
    _cpu: float = 0.0  # seconds of the method's round in this process

    def start(self) -> None:
        """From the state before training, which is round 0."""
        # round 0 is measured and saved like any other, so that there is always a checkpoint to resume from
        self._announce(0)
        self.changed()
        for client in self.server.clients:
            if (counts := self.server.weight(client)) < (own := client.samples):
                reason = f"joined with {own} samples, counts for {counts} in averages (aggregation.clip.weight)"
                self.cohorts.record_incident(0, client.id, "weight_capped", reason)
        run = self.experiment.run
        for name, attack in attacks_by_client(run.attackers, self.server.clients, run.seed).items():
            reason = f"is made to attack: {attack.component_name()} (run.attackers)"
            self.cohorts.record_incident(0, name, ATTACKER, reason)
        self.measure_server()
        self._complete(0, Ledger(), None, 0)
        self._rounds(1)

    def resume(self, setup: Callable[[], None], config: str = "") -> None:
        """From the last complete round, by another ``config`` if one is given; without such a round after ``setup``."""
        self.folder.mend_history()
        done = self.restore() if self.folder.has_checkpoints() else None
        if done is None:  # killed before the first was complete
            self.folder.rewind_logs(dict.fromkeys(LOGS, 0))  # lines of a round that did not become complete
            setup()
        if config:  # nothing is refused any more
            self.folder.change_config(config)
        if done is None:
            return self.start()
        self._announce(done)
        return self._rounds(done + 1)

    def _announce(self, done: int) -> None:
        cfg = self.experiment
        self.events.handle(RunStarted(cfg.name, cfg.run.rounds, len(self.server.clients), done))
        if done:
            self.events.handle(Incident(done, SERVER, "resumed", f"after round {done}", is_result=False))

    def _rounds(self, first: int) -> None:
        for number in range(first, self.experiment.run.rounds + 1):
            self.round(number)

    def round(self, number: int) -> None:
        """One round, until it is on disk."""
        cfg, started, ledger = self.experiment, time.monotonic(), Ledger()
        self.server.begin(number)
        self.server.global_models.forget_values()  # rounds go on from the global models
        cohort = self.cohorts.drawn(number, ledger)
        asked = cohort.awaited
        self.events.handle(RoundStarted(number, sorted(asked) if cfg.algorithm.asks_clients else []))
        began = time.process_time()
        # draws of the server depend on nothing but seed and round: a resumed round repeats them
        with isolated(cfg.run.seed, number, SERVER):
            cfg.algorithm.round(self.server, cohort)
        self._cpu = time.process_time() - began
        replies = len(cohort.heard & asked)  # before clients are asked for metrics, as all are
        self.server.warn_if_idle(self._idle)
        # a personal model changes only where its client took part; a shared one changes everywhere
        self.changed(cohort.may_have_changed(asked) if cfg.algorithm.is_personal else None)
        if number % cfg.run.eval_every == 0 or number == cfg.run.rounds:
            self.measure_server()
            self.measure_clients(number, ledger)
        self.cohorts.tell_costs(number)
        report(Working(SERVER, "saving the round"))
        self._complete(number, ledger, time.monotonic() - started, replies)

    def _complete(self, number: int, ledger: Ledger, seconds: float | None, replies: int) -> None:
        self.cohorts.tell_notices(number)
        self.save(number, ledger, seconds)
        self.events.handle(RoundComplete(number, seconds, ledger.total("up"), ledger.total("down"), replies))

    # ---- who is measured, and which model is the best so far

    def changed(self, clients: Iterable[str] | None = None) -> None:
        """These clients' models may have changed; None: all clients'."""
        self.stale |= {client.id for client in self.server.clients} if clients is None else set(clients)

    def measure_server(self) -> None:
        number = self.server.clock.round
        for name, samples in (("validation", self.server.validation), ("test", self.server.test)):
            if samples is None or not self.server.has_model:
                continue
            report(Working(SERVER, f"measuring ({name})"))
            metrics = self.server.evaluate(samples)
            known = metrics.intervals() if name == "test" and isinstance(metrics, TaskScores) else {}
            primary = self.server.task.primary
            # the metric that chooses comes first: readers of records have no tasks
            ordered = {metric: metrics[metric] for metric in sorted(metrics, key=primary.__ne__)}
            self.events.handle(Measured(number, SERVER, name, ordered, known))
            if name == "validation":
                before = {int(self.best["round"]): self.best["score"]} if self.best else {}
                if best_round({**before, number: metrics[primary]}) == number:
                    self.best = {"round": number, "score": metrics[primary]}

    def measure_clients(self, number: int, ledger: Ledger) -> None:
        """On their own test samples, those that may have changed and are not busy; others keep their last metrics."""
        timeline = self.cohorts.timeline
        # who is at work in real time would answer nothing else before
        busy = timeline.at_work if timeline is not None and timeline.is_real else ()
        clients = tuple(client for client in self.due() if client.id not in busy)
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
        chosen = {client.id for alike in groups.values() for client in alike[:most]} & self.stale
        return tuple(client for client in self.server.clients if client.id in chosen)

    # ---- what lasts

    def save(self, number: int, ledger: Ledger, seconds: float | None) -> None:
        """Write a complete round; its checkpoint comes last and makes it count."""
        # a kill may come after any line: resuming cuts the logs back to the sizes in the newest manifest
        folder, cohorts = self.folder, self.cohorts
        folder.append("metrics", self.recorder.take())
        folder.append("ledger", ledger.records)
        if cohorts.timeline is not None:
            folder.append("pace", cohorts.timeline.taken())
        if seconds is not None:
            folder.append("timing", [{"round": number, "seconds": round(seconds, 3), "cpu": round(self._cpu, 3)}])
        for name, (values, clients) in self.server.diagnostics.arrays.items():
            path = f"arrays/{name}/round-{number:04d}.safetensors"
            folder.save_tensors(path, {"values": values}, {"clients": json.dumps(clients)})
        # after metrics, which show whether it is the best
        self.save_models(["best", "last"] if self.best.get("round") == number else ["last"])
        tensors = flatten(self.server.snapshot()) | cohorts.tensors()
        facts: dict[str, Any] = {"logs": folder.log_sizes(), "stale": sorted(self.stale), "best": self.best}
        folder.save_checkpoint(Checkpoint(number, tensors, facts | cohorts.facts()))

    def restore(self) -> int:
        """Be as after the newest complete round that can be used; gives its number.

        Raises:
            RunError: there is none.
        """
        checkpoint, problems = self.folder.newest_checkpoint(self._problem_of)
        if checkpoint is None:
            reason = "; ".join(problems) or "no round was completed"
            begun = self.folder.begun_by()
            remedy = "" if begun in ("", __version__) else f"resume it with polyfed {begun}, which began it, or "
            raise RunError(f"'{self.folder.path}' has no usable checkpoint ({reason}); {remedy}start the run again")
        for problem in problems:
            log.warning("%s; continuing from round %d", problem, checkpoint.round)
            self.events.handle(Incident(checkpoint.round, SERVER, "checkpoint_skipped", problem, is_result=False))
        # logs last: if anything above cannot be restored, nothing on disk has changed
        facts = checkpoint.facts
        self.server.restore(checkpoint.round, unflatten(checkpoint.tensors))
        self.stale, self.best = set(facts["stale"]), dict(facts["best"])
        self.cohorts.restore(facts, checkpoint.tensors)
        self.folder.rewind_logs(facts["logs"])
        return checkpoint.round

    def _problem_of(self, checkpoint: Checkpoint) -> str:
        """Unreadable part of that round: records, or the state of a client that lives here; empty if nothing is."""
        if lost := self.folder.lost_records(checkpoint.facts["logs"]):
            return f"after round {checkpoint.round} {lost}"
        client = None if self.states is None else self.states.damaged(accepted_in(checkpoint.facts))
        return "" if client is None else f"the state of client '{client}' is damaged"
