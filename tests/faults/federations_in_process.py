"""Deployed federations without processes: real site folders on a fake grid; and a session on which asks are tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from fake_grid import FakeGrid, Rule

import polyfed
from polyfed.core.errors import PayloadError
from polyfed.deploy import host
from polyfed.deploy.engines.flower import Flower, within
from polyfed.deploy.engines.flower_node import Host, Node
from polyfed.deploy.host import open_host
from polyfed.deploy.init import create_federation
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort, CohortListener, ReplyPolicy
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.opened import Run
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Failure
from sessions import crossing


class SiteProcess:
    """Opens a site once, as a site's worker does."""

    def __init__(self) -> None:
        self.opened_host: dict[str, Host] = {}

    def __call__(self, spec: str, config: Mapping[str, Any]) -> Host:
        if spec not in self.opened_host:
            self.opened_host = {spec: open_host(spec, config)}
        return self.opened_host[spec]

    def end(self) -> None:
        """A new process takes its place."""
        self.opened_host = {}
        host.opened_host.cache_clear()


@dataclass
class InProcess:
    """Folders of a federation, and the grid over which its nodes are reached.

    Attributes:
        folder: Folder from ``polyfed deploy init``.
        grid: Grid with one node per site.
        engine: settings of the engine that make waiting short.
    """

    folder: Path
    grid: FakeGrid
    engine: dict[str, Any]

    @classmethod
    def made(cls, folder: Path, config: Mapping[str, Any], **engine: Any) -> InProcess:
        create_federation(folder, Experiment.parse(config), ["localhost"], keys=True)
        nodes = {}
        for number, name in enumerate(config["clients"]):
            nodes[101 + 7 * number] = (Node(SiteProcess()), {"config": str(folder / name / "site.yaml")})
        made = cls(folder, FakeGrid(nodes), {"poll": 0.001, "absence": 0.05, "join": 0.3} | engine)
        for name in config["clients"]:  # tests ask for other runs and rounds than those planned
            demands = yaml.safe_load((folder / name / "site.yaml").read_text())["demands"]
            made.edit(name, {"demands": demands | {"plan": "any"}})
        return made

    def node(self, site: str) -> int:
        """Id of a site's node."""
        return next(node for node, (_, config) in self.grid.nodes.items() if f"/{site}/" in config["config"])

    def states(self, site: str, client: str) -> Path:
        """Where a client keeps its states; there has been one run."""
        return next((self.folder / site / "state").glob("*/clients")) / client

    def restart(self, *sites: str) -> None:
        """Sites get new processes, which read everything anew."""
        for site in sites:
            serve, _ = self.grid.nodes[self.node(site)]
            serve.opener.end()  # type: ignore[attr-defined]

    def lies(self, site: str, change: Callable[[dict[str, Any]], Any]) -> None:
        """A site describes itself otherwise than it is from now on."""
        node = self.node(site)
        serve, config = self.grid.nodes[node]

        def changed(kind: str, fields: Any, frames: Any, own: Any) -> Any:
            reply, made = serve(kind, fields, frames, own)
            if kind == "describe":
                change(reply)
            return reply, made

        changed.opener = serve.opener  # type: ignore[attr-defined]
        self.grid.nodes[node] = (changed, config)

    def edit(self, place: str, change: Mapping[str, Any]) -> None:
        """Change top-level settings of a site's or the server's file."""
        path = self.folder / place / ("experiment.yaml" if place == "server" else "site.yaml")
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | dict(change)))

    def experiment(self, **run_settings: Any) -> dict[str, Any]:
        """The server's experiment, with an engine that waits for nothing long."""
        content: dict[str, Any] = yaml.safe_load((self.folder / "server" / "experiment.yaml").read_text())
        content["run"] |= run_settings | {"engine": content["run"]["engine"] | self.engine}
        return content

    def run(self, out: Path, **run_settings: Any) -> Run:
        """``polyfed run`` of the server's experiment, without SuperLink."""
        with within(self.grid):
            return polyfed.run(Experiment.parse(self.experiment(**run_settings)), out, quiet=True)

    def resume(self, out: Path) -> Run:
        """``polyfed resume``, without SuperLink."""
        with within(self.grid):
            return polyfed.resume(out, quiet=True)


@dataclass
class Struck(CohortListener):
    """A session whose client ``image`` is asked to ``fit``, round after round: much quicker than runs.

    Attributes:
        federation: its sites and its grid.
        session: attached to the grid.
        round: number of the last ask.
        reasons: why the client was excluded, ask by ask that it was.
        ledger: Ledger of the last ask.
    """

    federation: InProcess
    session: Session
    round: int = 0
    reasons: list[str] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)

    @classmethod
    def made(cls, folder: Path, config: dict[str, Any]) -> Struck:
        federation = InProcess.made(folder / "federation", config)
        experiment = Experiment.parse(federation.experiment(rounds=1000))  # one for each thing that happens
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
        server, method = self.session.server, self.session.experiment.algorithm
        known = crossing(self.session, server.represent_public())
        layout = method.public.layout(server, method.public.server_outputs(server), "representations")
        return bool(list(self._cohort().ask(method.fit, like=layout, representations=known)))

    def _cohort(self) -> Cohort:
        self.ledger = Ledger()
        cohort = self.session.cohort(self.round, self.ledger)
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
