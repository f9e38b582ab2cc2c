"""One process at work on a run: preparation, rounds, evaluation, checkpoints."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from polyfed.core.activity import at_work, heard_by, preparing
from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError, RunError, nearest
from polyfed.core.randomness import generator, isolated
from polyfed.core.untrusted import plain
from polyfed.engines.engine import Hosting
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort, Engine, ReplyPolicy
from polyfed.federation.federation import Federation
from polyfed.federation.gate import Usual
from polyfed.federation.server import Server
from polyfed.federation.state import StateStore, StateVersion, flatten, unflatten
from polyfed.federation.types import Blueprint
from polyfed.models.slots import described, require_described
from polyfed.runs.blueprints import told_blueprints
from polyfed.runs.environment import environment
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import LOGS, Checkpoint, RunFolder, disk_errors, naming_tracebacks
from polyfed.runs.progress import Progress, Reporter
from polyfed.runs.saved import save_model
from polyfed.runs.server_side import build_federation, build_server
from polyfed.runs.sink import SinkRun, SinkSet, round_records
from polyfed.wire.ledger import Ledger
from polyfed.wire.schema import steps_of

log = logging.getLogger(__name__)


@dataclass
class Session:
    """One process working on a run."""

    experiment: Experiment
    folder: RunFolder
    progress: Progress
    identity: str
    reporter: Reporter
    server: Server = field(init=False)
    engine: Engine = field(init=False)
    stale: set[str] = field(default_factory=set)
    away: set[str] = field(default_factory=set)
    best: dict[str, float] = field(default_factory=dict)
    accepted: dict[str, StateVersion] = field(default_factory=dict)
    notices: list[tuple[str, str, str]] = field(default_factory=list)
    _waiting_since: float = 0.0
    usual: Usual = field(default_factory=dict)

    def start(self) -> None:
        """A new run, from the first round."""
        self._serve(self._begin)
        self.finish()

    def resume(self) -> None:
        """From the round after the newest complete one."""
        self._serve(self._go_on)
        self.finish()

    # ---- preparation

    @cached_property
    def federation(self) -> Federation:
        """Data and models of everybody."""
        return build_federation(self.experiment, self.folder)

    @cached_property
    def hosting(self) -> Hosting:
        """The clients, for an engine."""
        spec = self.experiment.spec(self.identity, self.federation.public_order)
        return Hosting(
            self.experiment.site(),
            spec,
            self.folder.path.resolve(),
            self.federation,
            limits=self.experiment.run.limits,
            has_begun=self.folder.has_begun(),
            noticed=self._noticed,
        )

    def _serve(self, body: Callable[[], None]) -> None:
        with heard_by(self.progress):
            self._require_sound()

        def work(engine: Engine) -> None:
            with heard_by(self.progress):  # here too: an engine may have a thread of its own for it
                self.attach(engine)
                with disk_errors(self.folder), naming_tracebacks(self.folder), self.sinks:
                    body()

        with heard_by(self.progress):
            preparing(f"starting the engine '{self.experiment.run.engine.component_name()}'")
            self.experiment.run.engine.serve(self.hosting, work)

    def attach(self, engine: Engine) -> None:
        """Work with an engine: learn who is there, and build the server."""
        self.engine = engine
        self.server = build_server(self.experiment, self.federation, engine.clients(), self._blueprint)
        self.experiment.run.sampling.draw(self.server.clients, generator(0))  # what cannot be drawn fails here
        self.experiment.algorithm.require_effects(self.server)

    @cached_property
    def sinks(self) -> SinkSet:
        """The trackers that follow the run."""
        return SinkSet(self.experiment.run.sinks)

    def _follow(self, done: int) -> None:
        """Open the trackers; one that does not open must not keep a run from being resumed."""
        cfg = self.experiment
        content, name = cfg.model_dump(mode="json"), f"{cfg.name}-seed{cfg.run.seed}"
        told = SinkRun(self.folder.path, name, content, done, self.identity)
        self.sinks.open(told, lenient=self.folder.has_checkpoints())

    def _require_sound(self) -> None:
        cfg = self.experiment
        cfg.run.engine.require()
        cfg.algorithm.require(has_public=cfg.public is not None, has_server=cfg.server is not None)
        steps = steps_of(cfg.algorithm)
        for step in cfg.run.phases:
            if step not in steps:
                raise ConfigError(f"run.phases.{step}: '{cfg.algorithm.component_name()}': {nearest(step, steps)}")
        resolve_device(cfg.run.device)
        self.federation.require_sound()

    def _blueprint(self) -> Mapping[str, Blueprint]:
        """What clients' models are like: known here in a simulation, told once by the clients of a deployment."""
        if self.federation.members:
            return self.federation.blueprints()
        return told_blueprints(self.server.clients, self.folder, self._ask_initial)

    def _ask_initial(self, asked: tuple[ClientInfo, ...]) -> dict[str, Blueprint]:
        reply_policy = ReplyPolicy(min_clients=len(asked))
        cohort = self._cohort_of(0, asked, Ledger(), lambda step: reply_policy, purpose="setup:")
        algorithm: Any = self.experiment.algorithm
        found = {
            reply.sender.architecture: Blueprint(reply.weights.tensors, described(reply.slots))
            for reply in cohort.ask(algorithm.initial, check=lambda reply: require_described(reply.slots))
        }
        self.folder.append("ledger", cohort.ledger.records)
        return found

    def partition(self) -> dict[str, Any]:
        """Who holds which items, for the run folder; of a client that lives elsewhere, only how many."""
        members = self.federation.members
        return {
            client.id: self.federation.holding(members[client.id])
            if client.id in members
            else {"group": client.group, "source": "", "split": "", "items": client.samples, "samples": client.samples}
            for client in self.server.clients
        }

    # ---- rounds

    def _begin(self) -> None:
        self.experiment.algorithm.setup(self.server)
        config = self.experiment.to_yaml()
        self.folder.begin(self.identity, config, environment(self.experiment), self.partition())
        self._first()

    def _first(self) -> None:
        self._follow(0)
        self.stale = {client.id for client in self.server.clients}
        self._announce(0)
        self._cap_weights()
        self._evaluate_server()
        self._complete(0, Ledger(), None)
        self._rounds(1)

    def _go_on(self) -> None:
        self.folder.mend_history()
        if not self.folder.has_checkpoints():  # killed before the first was complete
            self.folder.rewind_logs(dict.fromkeys(LOGS, 0))
            self.experiment.algorithm.setup(self.server)
            return self._first()
        self._restore(checkpoint := self._newest())
        self._follow(checkpoint.round)
        self._announce(checkpoint.round)
        return self._rounds(checkpoint.round + 1)

    def _cap_weights(self) -> None:
        for client in self.server.clients:
            counts = self.server.weight(client)
            if counts < client.samples:
                reason = f"joined with {client.samples} samples, counts for {counts} in averages (run.bounds.weight)"
                self._event(0, client.id, "weight_capped", reason)

    def _rounds(self, first: int) -> None:
        for number in range(first, self.experiment.run.rounds + 1):
            self._round(number)

    def _round(self, number: int) -> None:
        cfg = self.experiment
        started = time.monotonic()
        self.server.begin(number)
        ledger = Ledger()
        cohort = self.cohort(number, ledger)
        asked = {client.id for client in cohort.clients}
        self.progress.round_started(number, sorted(asked) if cfg.algorithm.asks_clients else [])
        with isolated(cfg.run.seed, number, "server"):
            cfg.algorithm.round(self.server, cohort)
        for record in self.server.records:  # metrics of training, so that a live view has all that the records have
            if record["kind"] == "train":
                self.progress.evaluated(number, record["participant"], "train", record["metrics"])
        self.stale |= asked if cfg.algorithm.is_personal else {client.id for client in self.server.clients}
        if number % cfg.run.eval_every == 0 or number == cfg.run.rounds:
            self._evaluate_server()
            self._evaluate_clients(number, ledger)
        at_work("server", "saving the round")
        self._complete(number, ledger, time.monotonic() - started)

    def cohort(self, number: int, ledger: Ledger) -> Cohort:
        """The clients of a round."""
        run = self.experiment.run
        drawn = run.sampling.draw(self.server.clients, generator(run.seed, number, "cohort"))
        return self._cohort_of(number, drawn, ledger, run.reply_policy)

    def _cohort_of(
        self,
        number: int,
        clients: tuple[ClientInfo, ...],
        ledger: Ledger,
        reply_policy: Callable[[str], ReplyPolicy],
        *,
        purpose: str = "",
        first_phase: int = 0,
    ) -> Cohort:
        return Cohort(
            clients=clients,
            exchange=lambda requests, deadline: self.engine.exchange(requests, deadline),  # nothing else of it
            round=number,
            transport=self.experiment.run.transport,
            ledger=ledger,
            reply_policy=reply_policy,
            limits=self.experiment.run.limits,
            bounds=self.experiment.run.bounds,
            usual=self.usual,
            counted=self.server.counted,
            reaches=self.server.reaches,
            across=self.experiment.algorithm.mixes_types,
            folder=self.folder.path,
            accepted=self.accepted,
            excluded=lambda client, reason, details: self._excluded(number, client, reason, details),
            shortened=lambda client, reason: self._event(number, client.id, "update_shortened", reason),
            arrived=self._arrived,
            answered=lambda client, step: self._answered(number, client, step),
            asking=self._asking,
            purpose=purpose,
            first_phase=first_phase,
        )

    def _excluded(self, number: int, client: ClientInfo, reason: str, details: str) -> None:
        log.warning("round %d: client %s is excluded: %s", number, client.id, reason)
        self._event(number, client.id, "client_excluded", reason)
        self.away.add(client.id)
        if details:
            self.folder.add_traceback(number, client.id, details)

    def _asking(self, step: str, clients: Sequence[str]) -> None:
        self.progress.step_started(step, clients)
        self._waiting_since = time.monotonic()

    def _arrived(self, client: ClientInfo, step: str) -> None:
        self.progress.client_done(client.id, step, time.monotonic() - self._waiting_since)
        self._waiting_since = time.monotonic()

    def _answered(self, number: int, client: ClientInfo, step: str) -> None:
        if client.id in self.away:
            self.away.discard(client.id)
            self._event(number, client.id, "client_returned", f"answered '{step}'")

    def _noticed(self, participant: str, event: str, reason: str) -> None:
        """What the engine noticed beside the clients' answers: an event of the next round to be complete."""
        log.warning("%s: %s: %s", event.replace("_", " "), participant, reason)
        self.notices.append((participant, event, reason))

    def _record_notices(self, number: int) -> None:
        told, self.notices = self.notices, []
        for participant, event, reason in told:
            self._event(number, participant, event, reason)

    def _event(self, number: int, participant: str, event: str, reason: str) -> None:
        reason = plain(reason)  # others' words, which are recorded and shown in many places
        self.server.log("event", participant=participant, event=event, reason=reason)
        self.progress.event(number, participant, event, reason)

    # ---- evaluation

    def _evaluate_server(self) -> None:
        number = self.server.clock.round
        for kind, samples in (("validation", self.server.validation), ("test", self.server.test)):
            if samples is not None and self.server.has_model:
                at_work("server", f"measuring ({kind})")
                self._measured(number, "server", kind, self.server.evaluate(samples))

    def _measured(self, number: int, participant: str, kind: str, metrics: Mapping[str, float]) -> None:
        self.server.log(kind, participant=participant, metrics=dict(metrics))
        self.progress.evaluated(number, participant, kind, metrics)
        if participant == "server" and kind == "validation":
            self._select(number, metrics[self.server.task.primary])

    def _select(self, number: int, score: float) -> None:
        if not self.best or score > self.best["score"]:
            self.best = {"round": number, "score": score}
            self._save_server("best")

    def _evaluate_clients(self, number: int, ledger: Ledger) -> None:
        cfg = self.experiment
        clients = self._judged()
        if not clients:
            return

        def reply_policy(step: str) -> ReplyPolicy:
            return replace(cfg.run.reply_policy(step), min_clients=0)

        cohort = self._cohort_of(number, clients, ledger, reply_policy, purpose="evaluate:", first_phase=90)
        found = cfg.algorithm.evaluate_clients(self.server, cohort)
        for client, metrics in found.items():
            if metrics:
                self._measured(number, client, "test", metrics)
        self.stale -= set(found)

    def _judged(self) -> tuple[ClientInfo, ...]:
        wanted = self.experiment.run.evaluate_clients
        if wanted is False:
            return ()
        groups: dict[tuple[str, str], list[ClientInfo]] = {}
        for client in self.server.clients:  # groups of one type may be tested on different sources
            groups.setdefault((client.architecture, client.group), []).append(client)
        chosen = [client for alike in groups.values() for client in alike[: _all_or(wanted)]]
        return tuple(client for client in self.server.clients if client.id in self.stale and client in chosen)

    # ---- durability

    def _complete(self, number: int, ledger: Ledger, seconds: float | None) -> None:
        self._record_notices(number)
        told = round_records(number, self.server.records, ledger.records, seconds)
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
        self.sinks.write(told)
        if seconds is not None:
            self.progress.traffic(number, ledger.total("up"), ledger.total("down"))
            self.progress.round_finished(number, seconds)

    def _facts(self) -> dict[str, Any]:
        return {
            "logs": self.folder.log_sizes(),
            "stale": sorted(self.stale),
            "away": sorted(self.away),
            "best": self.best,
            "accepted": self.accepted,
            "usual": self.usual,
        }

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.server.restore(checkpoint.round, unflatten(checkpoint.tensors))
        self.stale, self.best = set(checkpoint.facts["stale"]), dict(checkpoint.facts["best"])
        self.away = set(checkpoint.facts["away"])
        self.accepted = _labels(checkpoint.facts)
        self.usual = {key: dict(found) for key, found in checkpoint.facts["usual"].items()}
        self.folder.rewind_logs(checkpoint.facts["logs"])

    def _newest(self) -> Checkpoint:
        checkpoint, problems = self.folder.newest_checkpoint(self._problem_of)
        if checkpoint is None:
            reason = "; ".join(problems) or "no round was completed"
            raise RunError(f"'{self.folder.path}' has no usable checkpoint ({reason}); start the run again")
        for problem in problems:
            log.warning("%s; continuing from round %d", problem, checkpoint.round)
            self._happened(checkpoint.round, "checkpoint_skipped", problem)
        return checkpoint

    def _problem_of(self, checkpoint: Checkpoint) -> str:
        """What is not readable of that round: records, or the state of a client that lives here and keeps anything."""
        if lost := self.folder.lost_records(checkpoint.facts["logs"]):
            return f"after round {checkpoint.round} {lost}"
        if not (self.federation.members and self.experiment.algorithm.keeps):
            return ""
        client = StateStore(self.hosting.states).damaged(_labels(checkpoint.facts))
        return "" if client is None else f"the state of client '{client}' is damaged"

    def _save_server(self, which: str) -> None:
        save_model(self.folder, f"models/{which}", self.server, self.experiment, self.federation.context)

    # ---- the ends

    def _announce(self, done: int) -> None:
        cfg = self.experiment
        self.progress.run_started(cfg.name, cfg.run.rounds, len(self.server.clients), done=done)
        if done:
            self._happened(done, "resumed", f"after round {done}")

    def _happened(self, number: int, event: str, reason: str) -> None:
        """What befell the run, not the federation: kept apart, since it is no part of the run's result."""
        self.folder.append("history", [{"round": number, "participant": "server", "event": event, "reason": reason}])
        self.progress.event(number, "server", event, reason)

    def finish(self) -> None:
        """Have the run reported."""
        with disk_errors(self.folder):
            summary = self.reporter(self.folder.path, self.experiment.run.plots)
        self.progress.run_finished(summary)


def _labels(facts: Mapping[str, Any]) -> dict[str, StateVersion]:
    return {client: (label[0], label[1]) for client, label in facts["accepted"].items()}


def _all_or(wanted: int) -> int | None:
    return None if wanted is True else wanted
