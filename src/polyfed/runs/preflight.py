"""What is refused before a run begins: by settings alone, by data and models, and by who there is once an engine is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings
from polyfed.federation.client import ClientInfo
from polyfed.federation.paces import Pace
from polyfed.federation.plan import FederationPlan, planned_clients
from polyfed.federation.population import Population
from polyfed.optim.settings import Schedule
from polyfed.runs.conflicts import Choice, require_together
from polyfed.runs.protection import require_affordable, require_attackers, require_cohorts, require_private
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
