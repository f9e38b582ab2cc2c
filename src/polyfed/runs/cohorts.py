"""How a run asks its clients: cohorts, what is known of clients from round to round, and what privacy has cost them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from polyfed.core.randomness import generator
from polyfed.core.untrusted import plain
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import EVALUATING, Cohort, CohortListener, Engine, ReplyPolicy
from polyfed.federation.filters import Ask, Checks, Filter, NormClip, RecentNorms, RobustReplies
from polyfed.federation.paced_cohort import (
    DROPPED,
    LOST,
    REPLIED,
    AtWork,
    Exchange,
    LateReplies,
    PacedCohort,
    RealTime,
    Timeline,
)
from polyfed.federation.paces import Buffered, SampledResponseTimes
from polyfed.federation.secure_ask import SecureSums
from polyfed.federation.server import Server
from polyfed.federation.state import flatten, unflatten
from polyfed.federation.types import Blueprint
from polyfed.models.slots import decode_slots, require_slots
from polyfed.privacy.accounting import epsilon_of, releases_within
from polyfed.runs.events import Callback, ClientDone, Incident, Measured, StepStarted
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.records import PACE, PRIVACY, SERVER
from polyfed.wire.ledger import Channel, Ledger
from polyfed.wire.messages import Answer, Failure, Request, StateVersion
from polyfed.wire.payload import Payload

log = logging.getLogger(__name__)


@dataclass
class Cohorts:
    """Makes the cohorts of a run, and reports outcomes of their clients.

    Attributes:
        experiment: its settings.
        folder: Folder of the run.
        server: Server of the run.
        engine: Engine that hosts the clients.
        events: Followers of answers and exclusions.
        accepted: client -> version of its state after the last step whose reply was accepted.
        recent_norms: how long updates last were, by whose median the next are bounded.
        away: clients that were excluded and have not answered since.
        fingerprint: Fingerprint of the run's spec, for keys of masked sums.
        notices: Incidents that the engine noticed; events of the next complete round.
        waiting_since: when the last client answered, or was asked.
    """

    experiment: Experiment
    folder: RunFolder
    server: Server
    engine: Engine
    events: Callback
    accepted: dict[str, StateVersion] = field(default_factory=dict)
    recent_norms: RecentNorms = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    fingerprint: str = ""
    notices: list[tuple[str, str, str]] = field(default_factory=list)
    waiting_since: float = 0.0

    @cached_property
    def expenses(self) -> Expenses | None:
        """Privacy cost of the clients, where the experiment protects them."""
        return None if self.experiment.privacy is None else Expenses(self.experiment, self.server.clients)

    @cached_property
    def timeline(self) -> Timeline | None:
        """The clients in time, if the run keeps any: virtual, or in a deployment the real one."""
        run, clients = self.experiment.run, self.server.clients
        if not isinstance(run.pace, Buffered) and run.pace.clients is None:
            return None
        times = (run.pace.clients or SampledResponseTimes()).of(clients, run.seed)
        if not run.engine.is_deployed:
            return Timeline(times)

        def sent(request: Request) -> Answer:
            """The answer to a request that is not encoded yet."""
            encoded = replace(request, payload=run.exchange.transport.encode(request.payload))
            return next(self.engine.exchange([encoded], run.exchange.reply_policy(request.step).deadline))

        return RealTime(times, send=sent)

    def drawn(self, number: int, ledger: Ledger) -> Cohort:
        run = self.experiment.run
        clients = run.sampling.draw(self.server.clients, generator(run.seed, number, "cohort"))
        return self._of(number, clients, ledger, run.exchange.reply_policy)

    def evaluating(self, number: int, clients: tuple[ClientInfo, ...], ledger: Ledger) -> Cohort:
        """Clients that are measured after a round; none of them must answer."""
        policy = self.experiment.run.exchange.reply_policy
        return self._of(
            number,
            clients,
            ledger,
            lambda step: replace(policy(step), min_clients=0),  # a lost measurement must not stop a run
            purpose="evaluate:",
            first_phase=EVALUATING,  # asks of one round need numbers of their own
        )

    def blueprints(self, clients: tuple[ClientInfo, ...]) -> dict[str, Blueprint]:
        """Blueprint of each architecture, asked of one client that has it before the first round."""
        policy, ledger = ReplyPolicy(min_clients=len(clients)), Ledger()
        cohort = self._of(0, clients, ledger, lambda step: policy, purpose="setup:")
        algorithm: Any = self.experiment.algorithm
        replies = cohort.ask(algorithm.initial, check=lambda reply: require_slots(reply.slots))
        made = {one.sender.architecture: Blueprint(one.weights.tensors, decode_slots(one.slots)) for one in replies}
        self.folder.append("ledger", ledger.records)  # at once: this ask belongs to no round that a checkpoint closes
        return made

    def _of(
        self,
        number: int,
        clients: tuple[ClientInfo, ...],
        ledger: Ledger,
        reply_policy: Callable[[str], ReplyPolicy],
        *,
        purpose: str = "",
        first_phase: int = 0,
    ) -> Cohort:
        """A cohort; only of one that trains, which has no ``purpose``, is any time kept."""
        experiment, run = self.experiment, self.experiment.run
        exchange: Exchange = self.engine.exchange
        make: Callable[..., Cohort] = Cohort
        timeline, pace = None if purpose else self.timeline, run.pace
        if timeline is not None and isinstance(pace, Buffered):
            exchange = timeline.carried(exchange)
            make = partial(PacedCohort, pace=pace, timeline=timeline, everybody=self.server.clients, seed=run.seed)
            timeline = None  # which the cohort keeps itself
        secure = experiment.aggregation.secure
        return make(
            clients=clients,
            round=number,
            channel=Channel(exchange, run.exchange.transport, ledger, run.exchange.limits, purpose),
            reply_policy=lambda step: replace(reply_policy(step), stopped_by=run.stopped_by),
            filters=self._filters,
            # a method's sums only: an evaluation shows each client
            secure=None if secure is None else SecureSums(secure, self.fingerprint),
            accepted=self.accepted,
            listener=CohortEvents(self, number, timeline),
            type_of=self.server.type_of,
            phase=first_phase,
        )

    @property
    def _filters(self) -> tuple[Filter[Ask], ...]:
        clip, rule = self.experiment.aggregation.clip, self.experiment.aggregation.robust
        pace = self.experiment.run.pace
        return (
            Checks(self.server.global_models.counted),
            # bounds are on what a client has changed, not on what that counts for; rules compare what does
            *(() if clip is None else (NormClip(clip, self.recent_norms),)),
            *((LateReplies(pace),) if isinstance(pace, Buffered) else ()),
            *(() if rule is None else (RobustReplies(rule),)),
            *self.experiment.algorithm.observers(self.server),
        )

    # ---- what becomes of clients

    def record_incident(self, number: int, participant: str, incident: str, reason: str, cause: str = "") -> None:
        """Announce an incident; clients word the reason, so it is made harmless before it is recorded and shown."""
        self.events.handle(Incident(number, participant, incident, plain(reason), cause))

    def tell_notices(self, number: int) -> None:
        while self.notices:  # the engine may notice more at this moment
            self.record_incident(number, *self.notices.pop(0))

    def tell_costs(self, number: int) -> None:
        """Report the privacy cost until now, the round's end in virtual time, and the staleness of its replies."""
        if self.expenses is not None:
            for participant, metrics in self.expenses.epsilons():
                self.events.handle(Measured(number, participant, PRIVACY, metrics))
        if self.timeline is not None:
            events = self.timeline.events
            late = [event.round - event.asked for event in events if event.event == REPLIED]
            timing = {"virtual_seconds": self.timeline.now, "replies": float(len(late))}
            timing |= {"staleness": sum(late) / len(late)} if late else {}
            for what in (DROPPED, LOST):
                timing[what] = float(sum(event.event == what for event in events))
            self.events.handle(Measured(number, SERVER, PACE, timing))

    # ---- what a checkpoint keeps

    def facts(self) -> dict[str, Any]:
        facts = {"away": sorted(self.away), "accepted": self.accepted, "recent_norms": self.recent_norms}
        facts |= {PRIVACY: self.expenses.asked} if self.expenses is not None and self.expenses.asked else {}
        return facts | ({} if self.timeline is None else {PACE: self.timeline.facts()})

    def tensors(self) -> dict[str, Tensor]:
        """Payloads of clients at work."""
        return {} if self.timeline is None else flatten({PACE: self.timeline.tensors()})

    def restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        if self.timeline is not None:
            self.timeline.restore(facts[PACE], unflatten(tensors).get(PACE, {}))
        self.away = set(facts["away"])
        self.accepted = accepted_in(facts)
        if self.expenses is not None:
            self.expenses.asked = {client: dict(counts) for client, counts in facts.get(PRIVACY, {}).items()}
        self.recent_norms = {key: dict(norms) for key, norms in facts["recent_norms"].items()}


@dataclass(frozen=True)
class CohortEvents(CohortListener):
    """Turns what becomes of the clients of a round's cohort into events."""

    cohorts: Cohorts
    round: int
    timeline: Timeline | None
    waited: dict[str, AtWork] = field(default_factory=dict)

    def asking(self, step: str, clients: Sequence[str]) -> None:
        if self.timeline is not None:
            requests = (Request(client, step, self.round, 0, None, Payload({})) for client in clients)
            self.waited.update((work.request.client, work) for work in self.timeline.wait_for(requests))
        if self.cohorts.expenses is not None:
            self.cohorts.expenses.note(step, clients)
        self.cohorts.events.handle(StepStarted(step, clients))
        self.cohorts.waiting_since = time.monotonic()

    def answered(self, client: ClientInfo, step: str) -> None:
        now = time.monotonic()
        self._note(REPLIED, client)
        self.cohorts.events.handle(ClientDone(client.id, step, now - self.cohorts.waiting_since))
        self.cohorts.waiting_since = now
        if client.id in self.cohorts.away:
            self.cohorts.away.discard(client.id)
            self.cohorts.record_incident(self.round, client.id, "client_returned", f"answered '{step}'")

    def clipped(self, client: ClientInfo, reason: str) -> None:
        self.cohorts.record_incident(self.round, client.id, "update_clipped", reason)

    def failed(self, client: ClientInfo, failure: Failure) -> None:
        if failure.details:
            self.cohorts.folder.add_traceback(self.round, client.id, failure.details)

    def excluded(self, client: ClientInfo, failure: Failure) -> None:
        log.warning("round %d: client %s is excluded: %s: %s", self.round, client.id, failure.cause, failure.text)
        self._note(LOST, client, failure.text)
        self.cohorts.record_incident(self.round, client.id, "client_excluded", failure.text, failure.cause)
        self.cohorts.away.add(client.id)

    def _note(self, event: str, client: ClientInfo, error: str | None = None) -> None:
        """Note the outcome, in virtual time, of a client's work."""
        if self.timeline is not None and (work := self.waited.pop(client.id, None)) is not None:
            self.timeline.note(event, work.request, self.round, work.ends, error)


def accepted_in(facts: Mapping[str, Any]) -> dict[str, StateVersion]:
    return {client: (version[0], version[1]) for client, version in facts.get("accepted", {}).items()}


class Expenses:
    """Privacy cost of the clients of a run, as known to the server: by the requests that it has sent.

    Args:
        experiment: Experiment of the run.
        clients: all that there are.
    """

    def __init__(self, experiment: Experiment, clients: Iterable[ClientInfo]) -> None:
        self._clients = {client.id: client for client in clients}
        self._policy, settings = experiment.policy, experiment.policy.privacy
        assert settings is not None
        self._settings = settings
        self.asked: dict[str, dict[str, int]] = {}

    def note(self, step: str, clients: Iterable[str]) -> None:
        if step in self._policy.charged:
            for client in clients:
                counts = self.asked.setdefault(client, {})
                counts[step] = counts.get(step, 0) + 1

    def epsilons(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Epsilon of each client that was ever asked, and of the federation: the largest of a client."""
        largest, budget, neighbours = 0.0, self._settings.budget, self._settings.neighbours
        for client, asked in sorted(self.asked.items()):
            info = self._clients[client]
            costs = [
                cost
                for step, count in sorted(asked.items())
                if (cost := self._policy.cost(self._policy.charged[step], info.samples, info.batch_size))
                for _ in range(count)
            ]
            if budget.epsilon is not None and len(set(costs)) == 1:  # clients refuse requests beyond the budget
                most = releases_within(costs[0], budget.epsilon, budget.delta, len(costs), neighbours)
                costs = costs[:most]
            if costs:
                epsilon = epsilon_of(costs, budget.delta, neighbours)
                largest = max(largest, epsilon)
                yield client, {"epsilon": epsilon, "replies": float(len(costs))}
        if largest:
            yield SERVER, {"epsilon": largest}
