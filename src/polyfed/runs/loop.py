"""The loop of a run: draw a cohort, do the algorithm's round, evaluate, checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from polyfed.core.activity import at_work
from polyfed.core.randomness import isolated
from polyfed.federation.attack import attacks_by_client
from polyfed.federation.server import Server
from polyfed.runs.checkpoints import Checkpoints
from polyfed.runs.cohorts import Cohorts
from polyfed.runs.evaluations import Evaluations
from polyfed.runs.events import Callback, Incident, RoundComplete, RoundStarted, RunStarted
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import LOGS, RunFolder
from polyfed.runs.records import ATTACKER, SERVER
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
