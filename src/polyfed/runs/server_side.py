"""The federation and the server of an experiment, put together from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyfed.core.device import resolve_device
from polyfed.federation.client import ClientInfo
from polyfed.federation.data import sample_views
from polyfed.federation.filters import counted
from polyfed.federation.population import Population
from polyfed.federation.server import Server, loaded, no_model
from polyfed.federation.trainer import Clock
from polyfed.federation.types import Blueprint
from polyfed.runs.events import Metrics
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder


def build_federation(experiment: Experiment, folder: RunFolder) -> Population:
    """Data and models of everybody, with vocabularies in the run folder.

    Args:
        experiment: its settings.
        folder: of the run.
    """
    return Population(
        experiment.data,
        experiment.public,
        experiment.server,
        experiment.clients,
        experiment.run.seed,
        folder.path / "vocabulary",
        experiment.algorithm.add_modules,
    )


def build_server(
    experiment: Experiment,
    federation: Population,
    clients: tuple[ClientInfo, ...],
    blueprint: Callable[[], Mapping[str, Blueprint]],
    measured: Callable[[Metrics], None],
) -> Server:
    """The server as it is before the first round.

    Args:
        experiment: its settings.
        federation: data and models.
        clients: everybody there.
        blueprint: gives what clients' models are like.
        measured: is given the server's metrics of training.
    """
    clip = experiment.aggregation.clip
    common: dict[str, Any] = {
        "name": "server",
        "clock": Clock(experiment.run.seed, 0, experiment.run.rounds, experiment.algorithm.epochs_a_round),
        "precision": experiment.run.precision,
        "evaluation_batch": experiment.run.evaluation_batch,
        "clients": clients,
        "counted": counted(clients, None if clip is None else clip.weight),
        "public_order": federation.public_order,
        "blueprint": blueprint,
        "measured": measured,
    }
    settings = experiment.server
    if settings is None:
        return Server(load_model=no_model, **common)
    model = federation.server_model().to(resolve_device(experiment.run.device))  # drawn on the CPU: same bits anywhere
    views = sample_views(settings.model, settings.task)
    validation = settings.validation_split
    return Server(
        load_model=lambda weights: loaded(model, weights),  # one module for all models that a server juggles
        objective=settings.task,
        head_name=federation.server_head,
        training=settings.training,
        public=federation.public_samples(views, settings.task.target_views),
        parts=federation.public_parts(views),
        validation=federation.server_samples(validation) if validation else None,
        test=federation.server_samples(settings.test_split),
        has_model=True,
        **common,
    )
