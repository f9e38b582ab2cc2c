"""One prepared run over a fake grid, on which asks are tried one by one: much quicker than runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_grid import Rule
from federations_in_process import InProcess

from polyfed.core.errors import PayloadError
from polyfed.deploy.engines.flower import Flower, within
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort, CohortListener, ReplyPolicy
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Failure
from sessions import crossing


@dataclass
class Struck(CohortListener):
    """A session whose client ``image`` is asked to ``fit``, round after round.

    Attributes:
        federation: its sites and its grid.
        session: attached to the grid.
        round: number of the last ask.
        reasons: why the client was excluded, ask by ask that it was.
    """

    federation: InProcess
    session: Session
    round: int = 0
    reasons: list[str] = field(default_factory=list)

    @classmethod
    def made(cls, folder: Path, config: dict[str, Any]) -> Struck:
        federation = InProcess.made(folder / "federation", config)
        experiment = Experiment.parse(federation.experiment())
        (folder / "run").mkdir()
        session = Session(experiment, RunFolder(folder / "run"), "a-test")
        assert isinstance(experiment.run.engine, Flower)
        with within(federation.grid):
            session.attach(experiment.run.engine.over(federation.grid, session.hosting))
        session.server.begin(1)
        struck = cls(federation, session)
        assert struck.answers()  # a client that has a state to go on from
        return struck

    def excluded(self, client: ClientInfo, failure: Failure) -> None:
        self.reasons.append(failure.text)

    def answers(self, *rules: Rule) -> bool:
        """Whether the client's reply to the next ask is used, if this happens."""
        self.round += 1
        self.federation.grid.rules = list(rules)
        known = crossing(self.session, self.session.server.represent_public())
        return bool(list(self._cohort().ask(self.session.experiment.algorithm.fit, representations=known)))

    def _cohort(self) -> Cohort:
        cohort = self.session.cohort(self.round, Ledger())
        cohort.clients = tuple(client for client in cohort.clients if client.id == "image")
        cohort.reply_policy = lambda step: ReplyPolicy(min_clients=0)
        cohort.listener = self
        return cohort

    def refuses(self, rule: Rule) -> str:
        """Why the client is out if this happens; it is to be back at the next ask, from where it stood."""
        before = dict(self.session.cohorts.accepted)
        if self.answers(rule) or rule.times:
            raise AssertionError(f"the reply was used, or nothing happened to it: {rule}")
        if self.session.cohorts.accepted != before:
            raise PayloadError("a step whose reply was refused has moved its client")
        return self.reasons[-1]
