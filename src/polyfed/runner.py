"""Running experiments: rounds, evaluation, checkpoints, resume."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed.engines.local import LocalEngine
from polyfed.engines.site import Site
from polyfed.environment import cpu_threads, environment, resolve_device
from polyfed.errors import ConfigError, RunError
from polyfed.experiment import Experiment
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort
from polyfed.federation.federation import Federation
from polyfed.federation.ledger import Ledger
from polyfed.federation.party import Clock
from polyfed.federation.server import Server
from polyfed.federation.state import StateStore, flatten, unflatten
from polyfed.models.model import Model
from polyfed.randomness import generator, isolated
from polyfed.reporting.plots import draw_all
from polyfed.reporting.progress import Progress, SilentProgress
from polyfed.reporting.records import RunRecords
from polyfed.reporting.report import report, write_report
from polyfed.runfolder import LOGS, Checkpoint, RunFolder
from polyfed.saved import save_model

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run on disk."""

    folder: Path

    @cached_property
    def records(self) -> RunRecords:
        """Metrics, events, bytes and partition."""
        return RunRecords.load(self.folder)

    def metrics(self, party: str = "server", kind: str = "test") -> Mapping[str, float]:
        """The last metrics of a party."""
        return self.records.last(party, kind)


def run(experiment: Experiment, out: Path | str, progress: Progress | None = None) -> Run:
    """Run an experiment into a new folder.

    Raises:
        PolyfedError: something does not fit; nothing is left at ``out`` unless a round was completed.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_threads(experiment.run.threads))
        with RunFolder.create(Path(out)) as folder:
            stack.enter_context(folder.lock())
            session = Session(experiment, folder, progress or SilentProgress())
            session.prepare()
            experiment.algorithm.setup(session.server)
            folder.begin(experiment.to_yaml(), environment(experiment), session.partition())
        session.start()
        return session.finish()


def resume(folder: Path | str, progress: Progress | None = None) -> Run:
    """Continue a run after its last complete round; the result is that of an uninterrupted run, bit for bit.

    Raises:
        RunError: not a run folder, its configuration was edited, or no checkpoint is readable.
    """
    opened = RunFolder.existing(Path(folder))
    experiment = Experiment.load(opened.path / "config.yaml")
    with cpu_threads(experiment.run.threads), opened.lock():
        session = Session(experiment, opened, progress or SilentProgress())
        session.prepare()
        session.resume()
        return session.finish()


@dataclass
class Session:
    """One process working on a run."""

    experiment: Experiment
    folder: RunFolder
    progress: Progress
    server: Server = field(init=False)
    site: Site = field(init=False)
    engine: LocalEngine = field(init=False)
    stale: set[str] = field(default_factory=set)
    best: dict[str, float] = field(default_factory=dict)

    # ---- preparation

    @cached_property
    def federation(self) -> Federation:
        """Data and models of everybody."""
        cfg = self.experiment
        vocabulary = self.folder.path / "vocabulary"
        return Federation(cfg.data, cfg.public, cfg.server, cfg.clients, cfg.run.seed, vocabulary)

    def prepare(self) -> None:
        """Open data, build the server, and check that all fits together."""
        cfg = self.experiment
        cfg.algorithm.require(has_public=cfg.public is not None, has_server=cfg.server is not None)
        device = resolve_device(cfg.run.device)
        self.federation.require_sound()
        self.site = Site(
            federation=self.federation,
            algorithm=cfg.algorithm,
            store=StateStore(self.folder.client_states, cfg.run.state_memory),
            seed=cfg.run.seed,
            rounds=cfg.run.rounds,
            device=device,
            precision=cfg.run.precision,
            evaluation_batch=cfg.run.evaluation_batch,
        )
        self.engine = LocalEngine(self.site, serialize=cfg.run.serialize)
        self.server = self._build_server(device)
        cfg.run.sampling.draw(self.server.clients, generator(0))  # a cohort that cannot be drawn fails here

    def _build_server(self, device: torch.device) -> Server:
        cfg, federation = self.experiment, self.federation
        common: dict[str, Any] = {
            "name": "server",
            "clock": Clock(cfg.run.seed, 0, cfg.run.rounds),
            "precision": cfg.run.precision,
            "evaluation_batch": cfg.run.evaluation_batch,
            "clients": self.engine.clients(),
            "public_order": federation.public_order,
            "blueprint": federation.initial_weights,
        }
        settings = cfg.server
        if settings is None:
            return Server(provide=_no_model, **common)
        model = federation.server_model().to(device)
        views = {name: encoder.view for name, encoder in settings.model.encoders.items()}
        validation = settings.validation_split
        return Server(
            provide=lambda weights: _loaded(model, weights),
            objective=settings.task,
            head_name=federation.server_head,
            training=settings.training,
            public=federation.public_samples(views),
            validation=federation.server_samples(validation) if validation else None,
            test=federation.server_samples(settings.test_split),
            has_model=True,
            **common,
        )

    def partition(self) -> dict[str, Any]:
        """Who holds which items, for the run folder."""
        return {member.id: self.federation.holding(member) for member in self.federation.members.values()}

    # ---- rounds

    def start(self) -> None:
        """From the first round."""
        self.stale = {client.id for client in self.server.clients}
        self._announce(0)
        ledger = Ledger()
        self._evaluate_server()
        self._complete(0, ledger, None)
        self._rounds(1)

    def resume(self) -> None:
        """From the round after the newest complete one."""
        if not self.folder.has_checkpoints():  # killed before the first was complete
            self.site.store.forget(0)
            self.folder.rewind_logs(dict.fromkeys(LOGS, 0))
            self.experiment.algorithm.setup(self.server)
            return self.start()
        checkpoint = self._newest()
        self._restore(checkpoint)
        self._announce(checkpoint.round)
        return self._rounds(checkpoint.round + 1)

    def _rounds(self, first: int) -> None:
        for number in range(first, self.experiment.run.rounds + 1):
            self._round(number)

    def _round(self, number: int) -> None:
        cfg = self.experiment
        started = time.monotonic()
        self.server.begin(number)
        ledger = Ledger()
        cohort = self._cohort(number, ledger)
        asked = {client.id for client in cohort.clients}
        self.progress.round_started(number, sorted(asked))
        with isolated(cfg.run.seed, number, "server"):
            cfg.algorithm.round(self.server, cohort)
        self.stale |= asked if "model" in cfg.algorithm.keeps else {client.id for client in self.server.clients}
        if number % cfg.run.eval_every == 0 or number == cfg.run.rounds:
            self._evaluate_server()
            self._evaluate_clients(number, ledger)
        self._complete(number, ledger, time.monotonic() - started)

    def _cohort(self, number: int, ledger: Ledger) -> Cohort:
        run = self.experiment.run
        drawn = run.sampling.draw(self.server.clients, generator(run.seed, number, "cohort"))
        return self._cohort_of(number, drawn, ledger, min_clients=run.min_clients)

    def _cohort_of(
        self,
        number: int,
        clients: tuple[ClientInfo, ...],
        ledger: Ledger,
        *,
        min_clients: int,
        purpose: str = "",
        first_phase: int = 0,
    ) -> Cohort:
        clock = time.monotonic

        def excluded(client: ClientInfo, reason: str) -> None:
            log.warning("round %d: client %s is excluded: %s", number, client.id, reason)
            self.server.log("event", party=client.id, event="client_excluded", reason=reason)
            self.progress.event(number, client.id, "client_excluded", reason)

        last = [clock()]

        def answered(client: ClientInfo, step: str) -> None:
            self.progress.client_done(client.id, step, clock() - last[0])
            last[0] = clock()

        return Cohort(
            clients=clients,
            exchange=lambda *message: self.engine.exchange(*message),  # nothing else of the engine is in reach
            round=number,
            transport=self.experiment.run.transport,
            ledger=ledger,
            min_clients=min_clients,
            deadline=self.experiment.run.deadline,
            excluded=excluded,
            answered=answered,
            purpose=purpose,
            first_phase=first_phase,
        )

    # ---- evaluation

    def _evaluate_server(self) -> None:
        number = self.server.clock.round
        for kind, samples in (("validation", self.server.validation), ("test", self.server.test)):
            if samples is not None and self.server.has_model:
                self._measured(number, "server", kind, self.server.evaluate(samples))

    def _measured(self, number: int, party: str, kind: str, metrics: Mapping[str, float]) -> None:
        self.server.log(kind, party=party, metrics=dict(metrics))
        self.progress.evaluated(number, party, kind, metrics)
        if party == "server" and kind == "validation":
            self._select(number, metrics[self.server.task.primary])

    def _select(self, number: int, score: float) -> None:
        if not self.best or score > self.best["score"]:
            self.best = {"round": number, "score": score}
            self._save_server("best")

    def _evaluate_clients(self, number: int, ledger: Ledger) -> None:
        cfg = self.experiment
        clients = tuple(client for client in self.server.clients if client.id in self.stale)
        if not cfg.run.evaluate_clients or not clients:
            return
        cohort = self._cohort_of(number, clients, ledger, min_clients=0, purpose="evaluate:", first_phase=90)
        found = cfg.algorithm.evaluate_clients(self.server, cohort)
        for client, metrics in found.items():
            if metrics:
                self._measured(number, client, "test", metrics)
        self.stale -= set(found)

    # ---- durability

    def _complete(self, number: int, ledger: Ledger, seconds: float | None) -> None:
        self.folder.append("metrics", self.server.records)
        self.folder.append("ledger", ledger.records)
        if seconds is not None:
            self.folder.append("timing", [{"round": number, "seconds": round(seconds, 3)}])
        for name, (values, clients) in self.server.arrays.items():
            path = f"arrays/{name}/round-{number:04d}.safetensors"
            self.folder.save_tensors(path, {"values": values}, {"clients": json.dumps(clients)})
        self._save_server("last")
        self.folder.save_checkpoint(Checkpoint(number, flatten(self.server.snapshot()), self._facts()))
        self.server.forget_records()
        if seconds is not None:
            self.progress.round_finished(number, seconds)

    def _facts(self) -> dict[str, Any]:
        return {"logs": self.folder.log_sizes(), "stale": sorted(self.stale), "best": self.best}

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.server.restore(checkpoint.round, unflatten(checkpoint.tensors))
        self.stale, self.best = set(checkpoint.facts["stale"]), dict(checkpoint.facts["best"])
        self.folder.rewind_logs(checkpoint.facts["logs"])
        self.site.store.forget(checkpoint.round + 1)

    def _newest(self) -> Checkpoint:
        problems: list[str] = []
        for found in self.folder.checkpoints():
            damaged = None if isinstance(found, RunError) else self.site.store.damaged(found.round + 1)
            if not isinstance(found, RunError) and damaged is None:
                for problem in problems:
                    log.warning("%s; continuing from round %d", problem, found.round)
                    self.progress.event(found.round, "server", "checkpoint_skipped", problem)
                return found
            problems.append(
                str(found) if isinstance(found, RunError) else f"the state of client '{damaged}' is damaged"
            )
        reason = "; ".join(problems) or "no round was completed"
        raise RunError(f"'{self.folder.path}' has no usable checkpoint ({reason}); start the run again")

    def _save_server(self, which: str) -> None:
        save_model(self.folder, f"models/{which}", self.server, self.experiment, self.federation.context)

    # ---- the ends

    def _announce(self, done: int) -> None:
        cfg = self.experiment
        self.progress.run_started(cfg.name, cfg.run.rounds, len(self.server.clients), done=done)
        if done:
            self.progress.event(done, "server", "resumed", f"after round {done}")

    def finish(self) -> Run:
        """Plots and report."""
        result = Run(self.folder.path)
        if self.experiment.run.plots:
            draw_all(self.folder.path)
        write_report(result.records)
        self.progress.run_finished(report(result.records))
        return result


def _no_model(weights: Mapping[str, Tensor] | None) -> Model:
    raise ConfigError("this method needs a server model; add a 'server' section")


def _loaded(model: Model, weights: Mapping[str, Tensor] | None) -> Model:
    if weights is not None:
        model.load_state_dict(dict(weights))
    return model
