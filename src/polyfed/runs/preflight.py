"""Checks before a run begins: of settings alone, of data and models, and of the clients of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings
from polyfed.federation.attack import attacks_by_client
from polyfed.federation.client import ClientInfo
from polyfed.federation.filters import require_enough
from polyfed.federation.plan import FederationPlan, planned_clients
from polyfed.federation.population import Population
from polyfed.federation.secure_ask import require_several
from polyfed.optim.settings import Schedule
from polyfed.privacy.accounting import accounting
from polyfed.privacy.private_training import opacus_optimizers, require_per_sample
from polyfed.privacy.settings import require_covered
from polyfed.runs.conflicts import Choice, conflicts
from polyfed.runs.settings import ExperimentSettings
from polyfed.wire.schema import steps_of


def checked_plan(experiment: ExperimentSettings) -> FederationPlan:
    """The federation that settings describe, after all checks that need neither data nor models.

    Raises:
        ConfigError: settings do not fit each other, or the method, or a package is missing.
        DataError: a source has no such split.
    """
    run, method, groups = experiment.run, experiment.algorithm, experiment.clients
    sections = experiment.data, experiment.public, experiment.server, groups
    plan = FederationPlan(*sections, run.rounds, planned_clients(groups))
    plan.require()
    method.require(plan)
    for step in run.exchange.phases:
        if step not in steps_of(method):
            hint = nearest(step, steps_of(method))
            raise ConfigError(f"run.exchange.phases.{step}: '{method.component_name()}': {hint}")
    _require_warmup(experiment, run.rounds)
    for conflict in conflicts(Choice(method, experiment.aggregation, run, experiment.privacy, experiment.initial)):
        raise ConfigError(conflict)
    if experiment.privacy is not None:
        _require_private(experiment)
    if experiment.aggregation.secure is not None:
        experiment.aggregation.secure.require()
    if plan.clients and not run.engine.is_deployed:
        _require_drawn(experiment, plan.clients)
        for attack in run.attackers:
            attack.require_known(plan.clients)
        # clients of several sources with one model and task are of one type only if their classes have the same names
        if len({(group.source, group.split) for group in groups.values()}) == 1:
            _require_cohorts(experiment, plan.clients)
    return plan


def preflight(experiment: ExperimentSettings, federation: Population) -> None:
    """Check data and models of a checked plan before an engine starts.

    Raises:
        ConfigError: settings do not fit the data, or the machine.
        DataError: data are missing or damaged.
    """
    run = experiment.run
    resolve_device(run.device)
    federation.require_sound()
    if run.attackers:
        _require_attackers(experiment, federation)
    if experiment.privacy is not None and experiment.privacy.samples is not None:
        # DP-SGD suits tasks and models of simulated clients
        for member in {info.architecture: federation.members[info.id] for info in federation.infos}.values():
            require_per_sample(member.settings.task, federation.client_model(member), member.id)


def require_readable(federation: Population) -> None:
    """Read one sample of each kind of participant, through its views and networks.

    Raises:
        ConfigError, DataError: a view cannot read a value, or a network its view.
    """
    one_of_each = {member.group: member for member in federation.members.values()}.values()
    read = [(federation.client_model(member), federation.train(member)) for member in one_of_each]
    if federation.server is not None:
        read.append((federation.server_model(), federation.server_samples(federation.server.test_split)))
    for model, samples in read:
        with torch.inference_mode():
            for modality, x in samples.batch(torch.arange(1)).inputs.items():
                model.eval().embed(modality, x.to(model.device))


def preflight_clients(experiment: ExperimentSettings, plan: FederationPlan, clients: tuple[ClientInfo, ...]) -> None:
    """Check that method and budget suit the clients of an engine, and that cohorts are large enough in every round.

    Raises:
        ConfigError: they do not, or are not.
    """
    experiment.algorithm.require(replace(plan, clients=clients))
    if experiment.run.engine.is_deployed:  # others are those of the plan
        _require_drawn(experiment, clients)
    _require_cohorts(experiment, clients)
    for client in clients if experiment.privacy is not None and experiment.privacy.samples is not None else ():
        _require_within_budget(experiment, planned_epsilon(experiment, client), f"'{client.id}'")


def _require_warmup(experiment: ExperimentSettings, rounds: int) -> None:
    """Check that no schedule warms up for longer than the run."""
    for path, schedule in schedules_in(experiment):
        if schedule.warmup > rounds:
            raise ConfigError(
                f"{path}.warmup is {schedule.warmup}, but run.rounds is {rounds}: the full rate would never be "
                "reached; lower the one, or raise the other"
            )


def schedules_in(settings: Any, path: str = "") -> Iterator[tuple[str, Schedule]]:
    """Dotted paths and schedules within settings."""
    if isinstance(settings, Schedule):
        yield path, settings
    for key, value in dict(settings).items() if isinstance(settings, Settings | Mapping) else ():
        yield from schedules_in(value, f"{path}.{key}".lstrip("."))


# ---- cohorts and attackers


def _require_drawn(experiment: ExperimentSettings, clients: tuple[ClientInfo, ...]) -> None:
    """Check that the pace suits the clients, and that a round has as many replies as quorums need."""
    run, pace = experiment.run, experiment.run.pace
    pace.require(clients)
    if pace.clients is not None:
        pace.clients.of(clients, run.seed)
    most = min(len(run.sampling.draw(clients, generator(0))), pace.most(clients))
    for key, quorum in run.exchange.quorums.items():
        if experiment.algorithm.asks_clients and quorum > most:
            raise ConfigError(f"run.exchange.{key} is {quorum}, but a round has {most} replies; set less, or a share")


def _require_cohorts(experiment: ExperimentSettings, clients: tuple[ClientInfo, ...]) -> None:
    """Check that each round's cohort has enough clients of each type for ``aggregation.robust``, or ``secure``."""
    rule, secure, run = experiment.aggregation.robust, experiment.aggregation.secure, experiment.run
    if rule is None and secure is None:
        return
    for number in range(1, 2 if run.sampling.cohort is None else run.rounds + 1):
        cohort = run.sampling.draw(clients, generator(run.seed, number, "cohort"))
        if rule is not None:
            require_enough(rule, cohort, f"round {number}")
        if secure is not None:
            require_several(cohort, f"round {number}")


def _require_attackers(experiment: ExperimentSettings, federation: Population) -> None:
    """Check that ``run.attackers`` are clients of this simulation and can attack as they are to."""
    run = experiment.run
    if not federation.members:
        raise ConfigError("run.attackers: 'clients' has no clients that could attack; leave it out")
    attacks = attacks_by_client(run.attackers, federation.infos, run.seed)
    for attack in run.attackers:
        own = [member for name, member in federation.members.items() if attacks.get(name) is attack]
        attack.require(own)
        for member in () if attack.falsifies else own:
            attack.poisoned(federation.train(member), member)  # absent data fail here


# ---- differential privacy


def _require_private(experiment: ExperimentSettings) -> None:
    """Check that all replies are protected, by packages that are installed."""
    policy, method = experiment.policy, experiment.algorithm.component_name()
    assert policy.privacy is not None
    accounting()
    require_covered(policy.privacy, policy.steps, method)
    if policy.privacy.samples is not None:
        opacus_optimizers()
    if not policy.charged:
        raise ConfigError(f"privacy has no effect: clients of '{method}' send nothing to protect; leave it out")
    if policy.privacy.reply is not None:
        _require_within_budget(experiment, policy.planned(policy.privacy.budget.delta), "a client")


def _require_within_budget(experiment: ExperimentSettings, planned: float | None, client: str) -> None:
    settings, run = experiment.privacy, experiment.run
    # clients that are drawn for some rounds only may stay within the budget
    if settings is None or settings.budget.epsilon is None or run.sampling.cohort is not None:
        return
    budget, limit = settings.budget, settings.budget.epsilon
    if planned is not None and planned > limit * (1 + 1e-6):
        raise ConfigError(
            f"privacy.budget.epsilon is {limit:g}, but {settings.planned_releases(run.rounds)} replies of {client} "
            f"cost epsilon {planned:.3g} at delta {budget.delta:g}; lower run.rounds, or raise the budget or "
            "noise_multiplier (that of privacy.reply may be left out: it follows from the budget)"
        )


def planned_epsilon(experiment: ExperimentSettings, client: ClientInfo) -> float | None:
    """Planned epsilon of a client with one protected reply per round, at the budget's delta; None without noise."""
    policy = experiment.policy
    if policy.privacy is None:
        return None
    delta = policy.privacy.budget.delta
    if policy.privacy.samples is None:
        return policy.planned(delta)
    by_step = policy.planned_training(client.samples, client.batch_size, delta, policy.privacy.neighbours)
    return next(iter(by_step.values()))
