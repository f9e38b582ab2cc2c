"""The federation and the server of an experiment, from its settings and what clients say of their models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from polyfed.core.device import resolve_device
from polyfed.core.errors import PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.federation.data import sample_views
from polyfed.federation.filters import counted
from polyfed.federation.participant import PublicSamples, TrainingSetup
from polyfed.federation.population import Population
from polyfed.federation.server import Diagnostics, Server, no_model, with_weights
from polyfed.federation.state import flatten, unflatten
from polyfed.federation.trainer import Clock
from polyfed.federation.types import Blueprint, GlobalModels
from polyfed.models.slots import decode_slots, encode_slots
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
        folder.salt if folder.has_begun() else experiment.salt,
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
    run, clip = experiment.run, experiment.aggregation.clip
    common: dict[str, Any] = {
        "name": "server",
        "clock": Clock(experiment.run.seed, 0, experiment.run.rounds, experiment.algorithm.epochs_a_round),
        "global_models": GlobalModels(
            clients, blueprint, counted(clients, clip.weight) if clip and clip.weight else {}
        ),
        "diagnostics": Diagnostics(measured),
    }
    settings = experiment.server
    if settings is None:
        public = PublicSamples(order=federation.public_order)
        return Server(load_model=no_model, setup=TrainingSetup(precision=run.precision), public=public, **common)
    model = federation.server_model().to(resolve_device(experiment.run.device))  # drawn on the CPU: same bits anywhere
    views = sample_views(settings.model, settings.task)
    validation = settings.validation_split
    return Server(
        load_model=lambda weights: with_weights(model, weights),  # one module for all models that a server juggles
        setup=TrainingSetup(
            settings.task, federation.server_head, settings.training, run.precision, run.evaluation_batch
        ),
        public=PublicSamples(
            federation.public_samples(views, settings.task.target_views),
            federation.public_parts(views),
            federation.public_order,
        ),
        validation=federation.server_samples(validation) if validation else None,
        test=federation.server_samples(settings.test_split),
        **common,
    )


_FILE = "blueprint.safetensors"
_TYPES = (torch.float32, torch.int64, torch.bool)  # of tensors that a client may describe


def collected_blueprints(
    clients: Sequence[ClientInfo], folder: RunFolder, ask: Callable[[tuple[ClientInfo, ...]], Mapping[str, Blueprint]]
) -> dict[str, Blueprint]:
    """Architecture -> blueprint; ``ask`` puts the question to one client of each, unless the folder knows.

    Architectures go by number in the file: their names have slashes.

    Raises:
        PayloadError: a client described its model wrongly.
    """
    names = list(dict.fromkeys(client.architecture for client in clients))
    if folder.tensors(_FILE) is None:
        first = {client.architecture: client for client in reversed(clients)}  # the earliest of each wins
        told = _sound(ask(tuple(client for client in clients if client in first.values())))
        numbered = {str(number): told[name] for number, name in enumerate(names)}
        slots = {number: encode_slots(blueprint.slots) for number, blueprint in numbered.items()}
        folder.save_tensors(_FILE, flatten({number: one.tensors for number, one in numbered.items()}), slots)
    tensors, texts = unflatten(folder.tensors(_FILE) or {}), folder.metadata(_FILE)
    return {name: Blueprint(tensors[str(k)], decode_slots(texts[str(k)])) for k, name in enumerate(names)}


def _sound(blueprints: Mapping[str, Blueprint]) -> Mapping[str, Blueprint]:
    for architecture, blueprint in blueprints.items():
        odd = sorted(set(chain(blueprint.tensors, blueprint.slots)) - (set(blueprint.tensors) & set(blueprint.slots)))
        if odd:
            raise PayloadError(f"a client with '{architecture}' describes tensor or slot of '{odd[0]}', but not both")
        for name, tensor in blueprint.tensors.items():
            if tensor.dtype not in _TYPES:
                valid = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TYPES)
                raise PayloadError(
                    f"a client with '{architecture}' says that '{name}' is {str(tensor.dtype).removeprefix('torch.')}; "
                    f"models have {valid}"
                )
    return blueprints
