"""Saved models of a run: weights as safetensors, and a configuration to rebuild them.

models/<best, last or round-N>/model.safetensors   weights
                      frozen.safetensors  weights that are not trained, if there are any
                      config.json         round, architecture, task, and facts that size the head
                      vocabulary/         vocabularies of the public set, so that it is not needed
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import safetensors.torch
import torch
from jaxtyping import Int64
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor, nn

from polyfed.core.errors import RunError
from polyfed.core.files import link_atomically, write_atomically
from polyfed.core.moved import without_gone
from polyfed.core.randomness import isolated
from polyfed.core.settings import first_problem
from polyfed.core.untrusted import code_of, file_json
from polyfed.data.samples import Samples
from polyfed.data.source import Column
from polyfed.data.view import DataContext
from polyfed.federation.population import Population
from polyfed.federation.server import Server
from polyfed.federation.settings import DataSettings, ServerSettings
from polyfed.models.frozen import frozen_tensors, replace_frozen
from polyfed.models.model import Model, ModelSettings, require_weights
from polyfed.runs.folder import RunFolder
from polyfed.tasks.task import Task

_FROZEN = "frozen.safetensors"
_Side = Annotated[int, Field(ge=0, le=4096)]


class TargetFacts(BaseModel):
    """Type, shape and greatest value of a target."""

    dtype: Literal["int64", "int32", "uint8", "bool", "float32", "float64"]
    shape: Annotated[tuple[_Side, ...], Field(max_length=2)]  # a class, a list of them, or an image of them
    greatest: int | float


class SampleFacts(BaseModel):
    """Facts of samples that size a task's head."""

    modalities: tuple[str, ...] = ()
    classes: dict[str, tuple[str, ...]] = {}
    targets: dict[str, TargetFacts] = {}
    lazy: dict[str, Annotated[tuple[_Side, ...], Field(max_length=2)]] = {}  # shapes


class SavedFacts(BaseModel):
    """Content of a model's ``config.json``."""

    round: Annotated[int, Field(ge=0)]
    model: ModelSettings
    task: Task
    head: str = ""
    samples: SampleFacts | None
    public: dict[str, str] = {}


class SavedModel(NamedTuple):
    """Content of a saved model's folder."""

    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]
    facts: SavedFacts
    context: DataContext
    model: Model

    @property
    def head(self) -> nn.Module | None:
        """The head of its task."""
        return dict(self.model.heads.items()).get(self.facts.head)


def read_model(folder: Path, data: DataSettings, place: torch.device, *, allow_code: bool) -> SavedModel:
    """Read a model that ``save_model`` wrote.

    Args:
        folder: Folder of the model.
        data: Folders of caches and pretrained weights.
        place: Device of the model.
        allow_code: See ``open_run``.

    Raises:
        RunError: the model is missing or damaged, its weights and configuration do not fit each other, or a weight is
            not finite.
        ConfigError: it names code that is not allowed, or a weights folder of the architecture is missing.
    """
    weights, config, facts = _read(folder, allow_code)
    learnt = {name: _absent(name, mark) for name, mark in facts.public.items()}
    context = DataContext(
        data.cache_folder, data.weights_folder, public=learnt, bundles=folder / "vocabulary", hub=allow_code
    )
    return SavedModel(weights, config, facts, context, _built(folder, facts, weights, context).to(place))


def _read(folder: Path, allow_code: bool) -> tuple[Mapping[str, Tensor], Mapping[str, Any], SavedFacts]:
    try:
        config = file_json((folder / "config.json").read_text())
        weights = safetensors.torch.load((folder / "model.safetensors").read_bytes())
        if (folder / _FROZEN).exists():
            weights |= safetensors.torch.load((folder / _FROZEN).read_bytes())
        with code_of(folder, allow_code):
            return weights, config, SavedFacts.model_validate(without_gone(config))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else " ".join(str(error).split())
        raise RunError(f"no readable model in '{folder}' ({reason}); finish the run with polyfed resume") from error


def _built(folder: Path, facts: SavedFacts, weights: Mapping[str, Tensor], context: DataContext) -> Model:
    """The model with its weights, on the CPU, in evaluation mode."""
    try:
        # building draws weights, which are then replaced: the caller's random state must not notice
        with isolated("saved"):
            head = facts.task.head(facts.model.dim, _outline(facts.samples or SampleFacts()))
            model = facts.model.build({} if head is None else {facts.head: head}, context)
        frozen = frozen_tensors(model)
        require_weights(weights, model.exchanged() | frozen)
        replace_frozen(model, weights)
        model.load({name: value for name, value in weights.items() if name not in frozen})
    except (RuntimeError, MemoryError) as error:  # torch's errors about impossible sizes
        reason = " ".join(str(error).split())
        raise RunError(f"'{folder}': weights and config.json do not fit each other ({reason})") from error
    return model.eval()


@dataclass(frozen=True)
class KeptModel:
    """A model that a run saves after its rounds.

    Attributes:
        config: Content of its ``config.json`` without the round.
        frozen: Weights that are not trained.
        weights: Returns the present values of the others.
    """

    config: Mapping[str, Any]
    frozen: Mapping[str, Tensor]
    weights: Callable[[], Mapping[str, Tensor]]


def kept_models(server: Server, settings: ServerSettings | None, population: Population) -> dict[str, KeptModel]:
    """Models that a run saves, by the end of their names: the server's, else the global model of each type of clients
    that live here, named after one of them if there are several types.

    Args:
        server: Server whose models are started or restored.
        settings: Settings of its own model, if it has one.
        population: The clients and their data.
    """
    public = {name: column.fingerprint for name, column in population.data.context.public.items()}

    def config(model: ModelSettings, task: Task, head: str, samples: Samples | None) -> dict[str, Any]:
        described = {"model": model.model_dump(mode="json"), "task": task.model_dump(mode="json"), "head": head}
        return described | {"samples": None if samples is None else _facts(samples), "public": public}

    if settings is not None:
        described = config(settings.model, settings.task, server.setup.head_name, server.test)
        return {"": KeptModel(described, frozen_tensors(server.model), server.model.exchanged)}
    members, kept = population.members, dict[str, KeptModel]()
    for name in server.weights:
        if (member := members.get(server.types[name].clients[0].id)) is not None:
            model = population.client_model(member)
            model.extras.clear()  # additions of a method are not part of the architecture in the settings
            described = config(member.model, member.settings.task, member.head, population.train(member))
            weights = partial(_chosen, server, name, tuple(model.exchanged()))
            end = f"-{member.id}" if len(server.types) > 1 else ""
            kept[end] = KeptModel(described, frozen_tensors(model), weights)
    return kept


def _chosen(server: Server, client_type: str, names: Sequence[str]) -> Mapping[str, Tensor]:
    return {name: server.weights[client_type][name] for name in names}


def save_model(folder: RunFolder, names: Sequence[str], number: int, kept: KeptModel, learnt: Path | None) -> None:
    """Write a model below a run folder, with its state after round ``number``; its weights are on the disk once.

    Args:
        folder: Folder of the run.
        names: Paths of the model below it.
        number: Number of the round.
        kept: The model.
        learnt: Folder of what its views learnt.
    """

    def put(name: str, file: str, tensors: Mapping[str, Tensor]) -> None:
        if name == names[0]:
            folder.save_tensors(f"{name}/{file}", tensors, {"format": "pt"})
        else:
            link_atomically(folder.path / names[0] / file, folder.path / name / file)

    for name in names:
        for file in sorted(learnt.glob("*.json")) if learnt else ():
            target = folder.path / name / "vocabulary" / file.name
            if not target.exists():  # a vocabulary is named after its content, so what is there is the same
                write_atomically(target, file.read_bytes())
        if kept.frozen and not (folder.path / name / _FROZEN).exists():
            put(name, _FROZEN, kept.frozen)
        put(name, "model.safetensors", kept.weights())
        folder.write(f"{name}/config.json", json.dumps({"round": number, **kept.config}, indent=1) + "\n")


# ---- facts that size a head


def _facts(samples: Samples) -> dict[str, Any]:
    """Facts that may size a task's head: modalities, class names, and type, shape and range of the targets."""
    return {
        "modalities": list(samples.modalities),
        "classes": {name: list(classes) for name, classes in samples.classes.items()},
        "targets": {
            name: {
                "dtype": str(values.dtype).removeprefix("torch."),
                "shape": list(values.shape[1:]),
                "greatest": values.max().item() if values.numel() else 0,
            }
            for name, values in samples.targets.items()
        },
        "lazy": {name: list(values(samples.rows[name][:1]).shape[1:]) for name, values in samples.lazy.items()},
    }


def _outline(facts: SampleFacts) -> Samples:
    """One sample without content that has those facts."""
    return Samples(
        inputs={name: _NoInputs() for name in facts.modalities},
        rows={name: torch.zeros(1, dtype=torch.int64) for name in (*facts.modalities, *facts.lazy)},
        items=torch.zeros(1, dtype=torch.int64),
        targets={
            name: torch.full((1, *fact.shape), fact.greatest, dtype=getattr(torch, fact.dtype))
            for name, fact in facts.targets.items()
        },
        ids=("",),
        classes=facts.classes,
        lazy={name: _Zeros(shape) for name, shape in facts.lazy.items()},
    )


@dataclass(frozen=True)
class _Zeros:
    """A target of a shape, without content."""

    shape: tuple[int, ...]

    def __len__(self) -> int:
        return 1

    def __call__(self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None) -> Tensor:
        return torch.zeros(len(rows), *self.shape, dtype=torch.uint8)


class _NoInputs:
    def __len__(self) -> int:
        return 1

    def __call__(self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None) -> Tensor:
        raise TypeError("an outline of samples has no content")


def _absent(modality: str, fingerprint: str) -> Column:
    def read() -> NoReturn:
        raise RunError(f"the saved model lacks the vocabulary of '{modality}'; copy it from the run folder")

    return Column(read, fingerprint, f"public set, '{modality}'", nested=False)
