"""The one check of a run before it begins: in two parts, as who takes part is known once an engine is there."""

from __future__ import annotations

from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator
from polyfed.federation.client import ClientInfo
from polyfed.federation.population import Population
from polyfed.runs.experiment import Experiment
from polyfed.runs.pacing import require_pace, require_paced_clients
from polyfed.runs.protection import (
    require_affordable,
    require_attackers,
    require_cohorts,
    require_private,
    require_robust,
    require_summable,
)
from polyfed.wire.schema import steps_of


def preflight(experiment: Experiment, federation: Population) -> None:
    """Check what can be checked before an engine starts, settings before data.

    Raises:
        ConfigError: settings do not fit each other, the method, or what is installed.
        DataError: they do not fit the data.
    """
    run, method = experiment.run, experiment.algorithm
    run.engine.require()
    method.require(has_public=experiment.public is not None, has_server=experiment.server is not None)
    _require_phases(experiment)
    require_pace(experiment)
    require_robust(experiment)
    require_private(experiment)
    require_summable(experiment)
    resolve_device(run.device)
    federation.require_sound()
    require_attackers(experiment, federation)
    require_affordable(experiment, federation)


def preflight_clients(experiment: Experiment, clients: tuple[ClientInfo, ...]) -> None:
    """Check that cohorts can be drawn from the clients of an engine, and are large enough in every round.

    Raises:
        ConfigError: they cannot, or are not.
    """
    experiment.run.sampling.draw(clients, generator(0))
    require_paced_clients(experiment, clients)
    require_cohorts(experiment, clients)


def _require_phases(experiment: Experiment) -> None:
    steps = steps_of(experiment.algorithm)
    for step in experiment.run.phases:
        if step not in steps:
            method = experiment.algorithm.component_name()
            raise ConfigError(f"run.phases.{step}: '{method}': {nearest(step, steps)}")
