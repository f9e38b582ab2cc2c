"""What is refused before a run begins: by settings alone, by data and models, and by who there is once an engine is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from polyfed.algorithms.algorithm import Algorithm
from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings
from polyfed.engines.attackers import ColludingEngine
from polyfed.engines.engine import Hosting
from polyfed.federation.attack import attacks_by_client
from polyfed.federation.attacks import Conspiracy
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Engine
from polyfed.federation.paces import Pace
from polyfed.federation.plan import FederationPlan, planned_clients
from polyfed.federation.population import Population
from polyfed.federation.robust_replies import require_enough
from polyfed.federation.secure_ask import require_several
from polyfed.optim.settings import Schedule
from polyfed.privacy.accounting import accounting
from polyfed.privacy.guard import PRIVATE, PrivacyGuard
from polyfed.privacy.private_training import opacus_optimizers, require_per_sample
from polyfed.privacy.settings import require_covered
from polyfed.runs.conflicts import Choice, require_together
from polyfed.runs.settings import ExperimentSettings
from polyfed.wire.schema import steps_of


def require_settings(experiment: ExperimentSettings) -> None:
    """Check all that settings alone tell, and packages that they take: no data are opened, nothing is built.

    Raises:
        ConfigError: settings do not fit each other, or the method.
        DataError: a source has no such split.
    """
    plan = _plan(experiment)
    plan.require()
    experiment.algorithm.require(plan)
    steps = steps_of(experiment.algorithm)
    for step in experiment.run.exchange.phases:
        if step not in steps:
            method = experiment.algorithm.component_name()
            raise ConfigError(f"run.exchange.phases.{step}: '{method}': {nearest(step, steps)}")
    rounds = experiment.run.rounds
    for path, schedule in _schedules(experiment):
        if schedule.warmup > rounds:
            raise ConfigError(
                f"{path}.warmup is {schedule.warmup}, but run.rounds is {rounds}: the full rate would never be "
                "reached; lower the one, or raise the other"
            )
    if experiment.run.engine.is_deployed:
        require_real_clock(experiment.run.pace)
    run, aggregation = experiment.run, experiment.aggregation
    require_together(Choice(experiment.algorithm, aggregation, run.pace, run.attackers))
    require_private(experiment)
    if aggregation.secure is not None:
        aggregation.secure.require()
    if plan.clients and not experiment.run.engine.is_deployed:
        _require_planned(experiment, plan)


def preflight(experiment: ExperimentSettings, federation: Population) -> None:
    """Check what can be checked before an engine starts, settings before data.

    Raises:
        ConfigError: settings do not fit each other, the method, or what is installed.
        DataError: they do not fit the data.
    """
    experiment.run.engine.require()
    require_settings(experiment)
    resolve_device(experiment.run.device)
    federation.require_sound()
    require_attackers(experiment, federation)
    require_affordable(experiment, federation)


def preflight_clients(experiment: ExperimentSettings, clients: tuple[ClientInfo, ...]) -> None:
    """Check that the method suits the clients of an engine, and that cohorts of them are large enough in every round.

    Raises:
        ConfigError: it does not, or they are not.
    """
    experiment.algorithm.require(replace(_plan(experiment), clients=clients))
    _require_drawn(experiment, clients)
    require_cohorts(experiment, clients)


def _plan(experiment: ExperimentSettings) -> FederationPlan:
    groups = experiment.clients
    sections = experiment.data, experiment.public, experiment.server, groups
    return FederationPlan(*sections, experiment.run.rounds, planned_clients(groups))


def _require_planned(experiment: ExperimentSettings, plan: FederationPlan) -> None:
    """Check what of the checks by who there is can be known before."""
    _require_drawn(experiment, plan.clients)
    for attack in experiment.run.attackers:
        attack.require_known(plan.clients)
    # clients of several sources with one model and task are of one type only if their classes have the same names
    if len({(group.source, group.split) for group in plan.groups.values()}) == 1:
        require_cohorts(experiment, plan.clients)


def _require_drawn(experiment: ExperimentSettings, clients: tuple[ClientInfo, ...]) -> None:
    """Check that the pace suits the clients, and that a round has as many replies as quorums need."""
    run, pace = experiment.run, experiment.run.pace
    pace.require(clients)
    if pace.clients is not None:
        pace.clients.of(clients, run.seed)
    most = min(len(run.sampling.draw(clients, generator(0))), pace.most(clients))
    for key, quorum in run.exchange.quorums.items():
        if experiment.algorithm.asks_clients and quorum > most:
            raise ConfigError(
                f"run.exchange.{key} is {quorum}, but a round has {most} replies; lower it, or give a share"
            )


def require_real_clock(pace: Pace) -> None:
    """Check that a pace suits a deployment.

    Raises:
        ConfigError: it sets virtual times.
    """
    if pace.clients is not None:
        raise ConfigError("run.pace.clients: a deployment has a real clock; leave it out")


def _schedules(settings: Any, *path: str) -> Iterator[tuple[str, Schedule]]:
    """All schedules within settings, with their paths."""
    if isinstance(settings, Schedule):
        yield ".".join(path), settings
    elif isinstance(settings, Settings | Mapping):
        for key, value in dict(settings).items():
            yield from _schedules(value, *path, str(key))


# ---- differential privacy


def require_private(experiment: ExperimentSettings) -> None:
    """Check that all that clients send is protected.

    Raises:
        ConfigError: something is not, or a package is not installed.
    """
    policy, method = experiment.policy, experiment.algorithm
    if (settings := policy.privacy) is None:
        return
    accounting()
    require_covered(settings, policy.steps, method.component_name())
    if settings.samples is not None:
        opacus_optimizers()
        require_learning_by_fit(type(method))
    if settings.metrics == "none" and experiment.run.evaluate_clients is not False:
        raise ConfigError(
            "run.evaluate_clients: metrics of clients' test samples are sent as they are, which privacy does not "
            "cover; set run.evaluate_clients: false, or accept it with privacy.metrics: clear"
        )
    if not policy.charged:
        raise ConfigError(
            f"privacy has no effect: clients of '{method.component_name()}' send nothing to protect; leave it out"
        )
    if settings.reply is not None:
        _require_within_budget(experiment, policy.planned(settings.budget.delta), "a client")


def require_learning_by_fit(method: type[Algorithm]) -> None:
    """Check that DP-SGD sees all that clients of a method learn of private data.

    Raises:
        ConfigError: nobody has vouched for that.
    """
    # what derives from a class that does may do more
    if not vars(method).get("learns_by_fit"):
        raise ConfigError(
            f"privacy.samples: clients of '{method.component_name()}' may learn of private data beside client.fit, "
            "which DP-SGD does not see; choose fedavg, fedet or fedmkd, or protect the reply (privacy.reply)"
        )


def require_affordable(experiment: ExperimentSettings, federation: Population) -> None:
    """Check that DP-SGD suits tasks and models of simulated clients, and that its planned rounds are within the budget.

    Raises:
        ConfigError: it does not, or they are not.
    """
    settings = experiment.policy.privacy
    if settings is None or settings.samples is None:
        return
    for member in {info.architecture: federation.members[info.id] for info in federation.infos}.values():
        require_per_sample(member.settings.task, federation.client_model(member), member.id)
    for info in federation.infos:
        _require_within_budget(experiment, planned_epsilon(experiment, info), f"'{info.id}'")


def _require_within_budget(experiment: ExperimentSettings, planned: float | None, who: str) -> None:
    settings, run = experiment.privacy, experiment.run
    # who is drawn for some rounds may stay within; who is asked in all of them does not
    if settings is None or settings.budget.epsilon is None or run.sampling.cohort is not None:
        return
    budget, limit = settings.budget, settings.budget.epsilon
    if planned is not None and planned > limit * (1 + 1e-6):
        raise ConfigError(
            f"privacy.budget.epsilon is {limit:g}, but {settings.planned_releases(run.rounds)} replies of {who} cost "
            f"epsilon {planned:.3g} at delta {budget.delta:g}; lower run.rounds, or raise the budget or "
            "noise_multiplier (that of privacy.reply may be left out: it follows from the budget)"
        )


def planned_epsilon(experiment: ExperimentSettings, client: ClientInfo) -> float | None:
    """Planned epsilon of a client with one protected reply a round, at the budget's delta; None if nobody can tell."""
    policy, group = experiment.policy, experiment.clients.get(client.group)
    if policy.privacy is None:
        return None
    delta = policy.privacy.budget.delta
    if policy.privacy.samples is None:
        return policy.planned(delta)
    if group is None:  # its batches are known at its site alone
        return None
    by_step = policy.planned_training(client.samples, group.training.batch_size, delta, policy.privacy.neighbours)
    return next(iter(by_step.values()))


def prepare_secret(hosting: Hosting) -> None:
    """Read or make the secret of a simulation before its processes begin.

    Raises:
        ConfigError: it cannot be read.
    """
    if hosting.spec.privacy is not None and hosting.federation.members:
        PrivacyGuard(hosting.spec.privacy, hosting.folder / PRIVATE, hosting.settings.secret).prepare()


# ---- who is asked, and who attacks


def require_cohorts(experiment: ExperimentSettings, clients: tuple[ClientInfo, ...]) -> None:
    """Check that each round's cohort has enough clients of each type for ``aggregation.robust``, or ``secure``.

    Raises:
        ConfigError: naming the first round, the type and its clients.
    """
    rule, secure, run = experiment.aggregation.robust, experiment.aggregation.secure, experiment.run
    if rule is None and secure is None:
        return
    for number in range(1, 2 if run.sampling.cohort is None else run.rounds + 1):
        cohort = run.sampling.draw(clients, generator(run.seed, number, "cohort"))
        if rule is not None:
            require_enough(rule, cohort, f"round {number}")
        if secure is not None:
            require_several(cohort, f"round {number}")


def require_attackers(experiment: ExperimentSettings, federation: Population) -> None:
    """Check that ``run.attackers`` are clients of this simulation and can attack as they are to.

    Raises:
        ConfigError: they are not or cannot, or the run is a deployment.
    """
    run = experiment.run
    if not run.attackers:
        return
    if not federation.members:
        raise ConfigError("run.attackers: there are no clients in 'clients' who could attack; leave it out")
    attacks = attacks_by_client(run.attackers, federation.infos, run.seed)
    for attack in run.attackers:
        own = [member for name, member in federation.members.items() if attacks.get(name) is attack]
        attack.require(own, federation.infos)
        for member in () if attack.falsifies else own:
            split = federation.data.split(member.settings.source, member.settings.split)
            attack.poisoned(federation.train(member), member, split, run.seed)  # what is not there fails here


def with_conspirators(engine: Engine, experiment: ExperimentSettings) -> Engine:
    """The engine, with the attackers who agree on what they send."""
    run = experiment.run
    attacks = attacks_by_client(run.attackers, engine.clients(), run.seed) if run.attackers else {}
    agreed = {name: attack for name, attack in attacks.items() if isinstance(attack, Conspiracy)}
    if not agreed:
        return engine
    return ColludingEngine(engine, agreed, steps_of(experiment.algorithm), run.exchange.transport, run.exchange.limits)
