"""The federation, its accounts and the server of an experiment, from settings and blueprints of clients' models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from polyfed.core.device import resolve_device
from polyfed.core.errors import PayloadError
from polyfed.data.assembly import of_column
from polyfed.data.source import Count, LeftOut, Split
from polyfed.data.view import DataContext, View
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

_LOOKED_AT = 500  # items of which a dry run counts what is cut off


def build_federation(experiment: Experiment, folder: RunFolder) -> Population:
    """Data and models of all participants, with vocabularies in the run folder."""
    salt = folder.salt if folder.has_begun() else experiment.salt
    sections = experiment.data, experiment.public, experiment.server, experiment.clients
    vocabulary, add_modules = folder.path / "vocabulary", experiment.algorithm.add_modules
    return Population(*sections, experiment.run.seed, vocabulary, add_modules, salt)


def build_server(
    experiment: Experiment,
    federation: Population,
    clients: tuple[ClientInfo, ...],
    blueprint: Callable[[], Mapping[str, Blueprint]],
    measured: Callable[[Metrics], None],
) -> Server:
    """The server before the first round.

    Args:
        experiment: Settings of the run.
        federation: Data and models.
        clients: All clients of the engine.
        blueprint: Returns initial models by architecture.
        measured: Receives the server's metrics of training.
    """
    run, clip = experiment.run, experiment.aggregation.clip
    capped = counted(clients, clip.weight) if clip and clip.weight else {}
    common: dict[str, Any] = {
        "name": "server",
        "clock": Clock(experiment.run.seed, 0, experiment.run.rounds, experiment.algorithm.epochs_a_round),
        "global_models": GlobalModels(clients, blueprint, capped),
        "diagnostics": Diagnostics(measured),
    }
    own = experiment.server
    if own is None:
        public = PublicSamples(order=federation.public_order)
        return Server(load_model=no_model, setup=TrainingSetup(precision=run.precision), public=public, **common)
    model = federation.server_model().to(resolve_device(experiment.run.device))  # drawn on the CPU: same bits anywhere
    views = sample_views(own.model, own.task)
    validation, pairs = own.validation_split, federation.public_samples(views, own.task.target_views)
    return Server(
        load_model=lambda weights: with_weights(model, weights),  # one module for all models of the server
        setup=TrainingSetup(own.task, federation.server_head, own.training, run.precision, run.evaluation_batch),
        public=PublicSamples(pairs, federation.public_parts(views), federation.public_order),
        validation=federation.server_samples(validation) if validation else None,
        test=federation.server_samples(own.test_split),
        **common,
    )


def accounts_of(experiment: Experiment, federation: Population) -> dict[str, tuple[Count, ...]]:
    """Maps each source to its counts, including those of what views of its participants cut off.

    Sources at other sites are left out.

    Raises:
        DataError, ConfigError: a source or a view cannot be opened.
    """
    members = federation.members.values()
    opened = [(member.holdings[0].assignment.split, dict(member.views)) for member in members]
    if experiment.server is not None and experiment.public is not None:
        split = federation.data.split(experiment.public.source, experiment.public.split)
        opened.append((split, {name: encoder.view for name, encoder in experiment.server.model.encoders.items()}))
    read = [(split, name, view) for split, views in opened for name, view in views.items()]
    folder, context = experiment.data.data_folder, federation.data.context
    tasks = [member.settings.task for member in members]
    tasks += [experiment.server.task] if experiment.server else []
    targets = {target for task in tasks for target in task.target_views}
    accounts = dict[str, tuple[Count, ...]]()
    for source in dict.fromkeys(split.source for split, _, _ in read):
        counts = list(experiment.data.sources[source].account(name=source, data_dir=folder, used=targets))
        seen = set[str]()
        for split, modality, view in read:
            key = f"{split.name} {modality} {view.model_dump_json()}"
            if split.source == source and modality in split.columns and key not in seen:
                seen.add(key)
                counts += filter(None, [_cut(split, modality, view, context)])
        accounts[source] = (*counts, *_held(federation, source))
    return accounts


def _cut(split: Split, modality: str, view: View, context: DataContext) -> Count | None:
    """Count of what a view cuts off; where nothing is computed ahead, of the first items."""
    column = split.modality(modality)
    if context.ahead or len(split) <= _LOOKED_AT:
        return view.cut(column, modality, context)
    cut = view.cut(of_column(column, torch.arange(_LOOKED_AT)), modality, context)
    return cut and replace(cut, unit=f"{cut.unit} of the first {_LOOKED_AT} items")


def _held(federation: Population, source: str) -> Iterator[Count]:
    """Counts of the items of each split: all, and those that participants hold."""
    shares = [(part.assignment.split, part.items) for one in federation.members.values() for part in one.holdings]
    shares += [] if federation.public is None else [(federation.public.split, federation.public.all_items)]
    held: dict[str, tuple[Split, set[int]]] = {}
    for split, items in shares:
        if split.source == source:
            held.setdefault(split.name, (split, set()))[1].update(items.tolist())
    for name, (split, own) in held.items():
        left_out = [LeftOut("held by no participant", len(split) - len(own))]
        yield Count.of(f"items dealt ({name})", len(split), len(own), left_out)


_FILE = "blueprint.safetensors"
_TYPES = (torch.float32, torch.int64, torch.bool)  # of tensors that a client may describe


def collected_blueprints(
    clients: Sequence[ClientInfo], folder: RunFolder, ask: Callable[[tuple[ClientInfo, ...]], Mapping[str, Blueprint]]
) -> dict[str, Blueprint]:
    """Maps architectures to blueprints: those of the folder, else replies to ``ask`` of one client of each.

    The file has numbers for architectures, since their names have slashes.

    Raises:
        PayloadError: a client described its model wrongly.
    """
    names = list(dict.fromkeys(client.architecture for client in clients))
    if folder.tensors(_FILE) is None:
        first = {client.architecture: client for client in reversed(clients)}  # the earliest of each wins
        received = _sound(ask(tuple(client for client in clients if client in first.values())))
        numbered = {str(number): received[name] for number, name in enumerate(names)}
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
                    f"a client with '{architecture}' describes '{name}' as {str(tensor.dtype).removeprefix('torch.')}; "
                    f"models have {valid}"
                )
    return blueprints
