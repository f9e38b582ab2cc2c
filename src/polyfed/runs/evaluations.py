"""Who is measured when, and which model is the best so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.activity import at_work
from polyfed.federation.client import ClientInfo
from polyfed.federation.server import Server
from polyfed.runs.cohorts import Cohorts
from polyfed.runs.events import Callback, Measured
from polyfed.runs.experiment import Experiment
from polyfed.runs.records import SERVER
from polyfed.tasks.scores import TaskScores
from polyfed.wire.ledger import Ledger


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
