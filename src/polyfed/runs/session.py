"""One process at work on a run: preparations before the loop, and its end.

``polyfed.run`` and ``polyfed.resume`` add what shows and reports a run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from polyfed.core.activity import heard_by, preparing
from polyfed.core.device import cpu_threads, resolve_device
from polyfed.data.device_memory import memory_of
from polyfed.engines.engine import Hosting
from polyfed.federation.cohort import Cohort, Engine
from polyfed.federation.population import Population
from polyfed.federation.server import Server
from polyfed.federation.state import StateStore
from polyfed.federation.types import Blueprint
from polyfed.privacy.guard import PRIVATE, PrivacyGuard
from polyfed.runs.carried import CarriedModels, lengthened, with_round
from polyfed.runs.cohorts import Cohorts
from polyfed.runs.environment import environment
from polyfed.runs.events import PROGRESS, Callback, Callbacks, EventLog, Measured, Metrics, Recorder, RunComplete
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import ACCOUNTS, KEPT, History, RunFolder, disk_errors, naming_tracebacks
from polyfed.runs.loop import Loop
from polyfed.runs.opened import Run
from polyfed.runs.preflight import preflight, preflight_clients
from polyfed.runs.records import SERVER
from polyfed.runs.saved import KeptModel, kept_models, save_model
from polyfed.runs.server_side import accounts_of, build_federation, build_server, collected_blueprints
from polyfed.runs.sink import SinkRun, Trackers, public_settings
from polyfed.wire.ledger import Ledger

log = logging.getLogger(__name__)


def begin_run(experiment: Experiment, out: Path, callbacks: Iterable[Callback] = ()) -> Run:
    experiment = with_round(experiment)
    for sink in experiment.run.output.sinks:  # a resumed run goes on without
        sink.require()
    # threads are part of the configuration: a sum over a tensor has other last bits with another number of them
    with cpu_threads(experiment.run.threads), RunFolder.create(out) as folder, _logged(folder) as log:
        Session(experiment, folder, secrets.token_hex(8), [*callbacks, log]).start()
    return Run(out)


def continue_run(run: Run, callbacks: Iterable[Callback] = (), rounds: int | None = None) -> None:
    folder = run.files
    experiment, config = (run.experiment, "") if rounds is None else lengthened(run, rounds)
    with cpu_threads(experiment.run.threads), _logged(folder) as log:
        Session(experiment, folder, folder.identity, [*callbacks, log], run.allow_code).resume(config)


@contextlib.contextmanager
def _logged(folder: RunFolder) -> Iterator[EventLog]:
    with folder.lock(), contextlib.closing(EventLog(folder.path / PROGRESS)) as log:
        yield log


@dataclass
class Session:
    """One process working on a run.

    Attributes:
        experiment: Settings of the run.
        folder: Folder of the run.
        identity: The same for all processes that ever work on the run.
        callbacks: Followers of the run.
        hub: True if pretrained networks may come from the hub.
        server, engine, cohorts: Set once an engine is attached.
        recorder: Records of the current round.
    """

    experiment: Experiment
    folder: RunFolder
    identity: str
    callbacks: Iterable[Callback] = ()
    hub: bool = True
    server: Server = field(init=False)
    engine: Engine = field(init=False)
    cohorts: Cohorts = field(init=False)
    recorder: Recorder = field(init=False, default_factory=Recorder)
    _notices: list[tuple[str, str, str]] = field(init=False, default_factory=list)

    def start(self) -> None:
        self._serve(self._begin)

    def resume(self, config: str = "") -> None:
        """Go on after the last complete round, by another ``config`` if one is given."""
        self._serve(lambda: self.loop().resume(self.setup, config))

    def setup(self) -> None:
        """Prepare the method, from the models of another run if the experiment names one."""
        initial, setup = self.experiment.initial, self.experiment.algorithm.setup
        if initial is None:
            setup(self.server)
        else:
            states = StateStore(self.hosting.states) if "model" in self.experiment.algorithm.keeps else None
            carried = CarriedModels.of(initial)
            text, self.cohorts.accepted = carried.start(self.server, setup, self.folder.path, states)
            self._notices.append((SERVER, "initial_models", text))

    @cached_property
    def trackers(self) -> Trackers | None:
        cfg = self.experiment
        if not cfg.run.output.sinks:
            return None
        name = f"{cfg.name}-seed{cfg.run.seed}"
        run = SinkRun(self.folder.path, name, public_settings(cfg.model_dump(mode="json")), self.identity)
        return Trackers(cfg.run.output.sinks, run)

    @cached_property
    def events(self) -> Callbacks:
        """All followers of the run: records come before displays."""
        trackers = () if self.trackers is None else (self.trackers,)
        return Callbacks([self.recorder, History(self.folder), *trackers, *self.callbacks])

    @cached_property
    def federation(self) -> Population:
        federation = build_federation(self.experiment, self.folder)
        federation.data.hub, device = self.hub, resolve_device(self.experiment.run.device)
        federation.data.memory = memory_of(device, self.experiment.data.device_memory)
        return federation

    @cached_property
    def hosting(self) -> Hosting:
        """The clients, for an engine."""
        spec = self.experiment.spec(self.identity, self.federation.public_order)
        run, folder, site = self.experiment.run, self.folder.path.resolve(), self.experiment.site()
        stops, has_begun = bool(run.stopped_by), self.folder.has_begun()
        return Hosting(site, spec, folder, self.federation, run.exchange.limits, stops, has_begun, self._noticed)

    def _serve(self, body: Callable[[], None]) -> None:
        def work(engine: Engine) -> None:
            with heard_by(self.events):  # here too: an engine may have a thread of its own for it
                self.attach(engine)
                with disk_errors(self.folder), naming_tracebacks(self.folder), self.trackers or nullcontext():
                    body()

        with heard_by(self.events):
            self.require_sound()  # before the engine: it may take a minute to start, or a cluster
            preparing(f"starting the engine '{self.experiment.run.engine.component_name()}'")
            self.experiment.run.engine.serve(self.hosting, work)
        # after the engine has shut down: reports, which follow this event, can use its memory
        with disk_errors(self.folder):
            self.events.handle(RunComplete(self.folder.path))

    def require_sound(self) -> None:
        """Make all checks that need no engine, see ``preflight``; a simulation has its secret then."""
        self.experiment.run.engine.require()
        _ = self.experiment.plan
        preflight(self.experiment, self.federation)
        if (privacy := self.hosting.spec.privacy) is not None and self.federation.members:
            PrivacyGuard(privacy, self.hosting.folder / PRIVATE, self.hosting.settings.secret).prepare()

    def attach(self, engine: Engine) -> None:
        """Work with an engine: list its clients, and build the server."""
        self.engine, experiment, fingerprint = engine, self.experiment, self.hosting.spec.fingerprint

        def measured(metrics: Metrics) -> None:
            self.events.handle(Measured(self.server.clock.round, SERVER, "train", metrics))

        self.server = build_server(experiment, self.federation, engine.clients(), self._blueprint, measured)
        self.cohorts = Cohorts(
            experiment, self.folder, self.server, engine, self.events, fingerprint=fingerprint, notices=self._notices
        )
        preflight_clients(experiment, experiment.plan, self.server.clients)

    def _noticed(self, participant: str, incident: str, reason: str) -> None:
        log.warning("%s: %s: %s", incident.replace("_", " "), participant, reason)
        self._notices.append((participant, incident, reason))

    def _blueprint(self) -> Mapping[str, Blueprint]:
        if self.federation.members:
            return self.federation.blueprints()
        return collected_blueprints(self.server.clients, self.folder, self.cohorts.blueprints)

    def partition(self) -> dict[str, Any]:
        """Maps clients to the items that they hold, for the run folder; of a client at a site, only their number."""
        members = self.federation.members
        return {
            client.id: self.federation.holding(members[client.id])
            if client.id in members
            else {"group": client.group, "source": "", "split": "", "items": client.samples, "samples": client.samples}
            for client in self.server.clients
        }

    def cohort(self, number: int, ledger: Ledger) -> Cohort:
        return self.cohorts.drawn(number, ledger)

    # ---- the loop

    def _begin(self) -> None:
        # setup may refuse the clients, so nothing is written before
        self.setup()
        start = self.experiment.start
        config = self.experiment.to_yaml(start)  # which names nothing of this machine
        counted = accounts_of(self.experiment, self.federation)
        accounts = {source: [count.plain() for count in counts] for source, counts in counted.items()}
        self.folder.write(ACCOUNTS, json.dumps(accounts, ensure_ascii=False) + "\n")
        run = {"run": self.identity, "salt": self.experiment.salt}
        self.folder.begin(run, config, start, environment(self.experiment), self.partition())
        self.loop().start()

    def loop(self) -> Loop:
        """The loop, before its first round."""
        cfg = self.experiment
        # clients of a deployment keep their states at their sites
        has_states = self.federation.members and (cfg.algorithm.keeps or cfg.run.output.keep_client_models)
        states = StateStore(self.hosting.states) if has_states else None
        records = self.recorder, self.events
        return Loop(cfg, self.folder, self.server, self.cohorts, *records, self._save_models, states)

    def _save_models(self, names: Sequence[str]) -> None:
        number, bundles = self.server.clock.round, self.federation.data.context.bundles
        names = [*names, *([f"{KEPT}{number}"] if number in self.experiment.run.output.keep_rounds else [])]
        for end, kept in self._kept_models.items():
            save_model(self.folder, [f"models/{name}{end}" for name in names], number, kept, bundles)

    @cached_property
    def _kept_models(self) -> Mapping[str, KeptModel]:
        return kept_models(self.server, self.experiment.server, self.federation)
