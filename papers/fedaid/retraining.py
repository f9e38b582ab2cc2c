"""Effect of further training on private data on a model at every client.

``Retrain``: some layers, on one client's data or all (FedAID, Appendix A). ``Distortion``: how a round's local training
distorts the alignment of modalities (tables 6, 9 and 11).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, groupby
from statistics import fmean
from typing import Annotated, Any, TypeVar

import torch
from papers.drawing import Matrix, matrices_result
from pydantic import Field
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, DataError, nearest
from polyfed.core.randomness import isolated
from polyfed.data.samples import Samples, union
from polyfed.federation.membership import Member
from polyfed.federation.participant import Participant, TrainingSetup
from polyfed.federation.server import with_weights
from polyfed.federation.settings import TrainingSettings
from polyfed.federation.trainer import Clock
from polyfed.lab.analysis.analysis import Analysis, AnalysisResult, ModelName
from polyfed.lab.analysis.leakage import Simulated, TrainedModel
from polyfed.models.model import Model
from polyfed.optim.settings import Schedule
from polyfed.reporting.metrics import find_recalls
from polyfed.reporting.tables import count
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER

LearningRate = Annotated[
    float | None, Field(gt=0, le=100, description="constant learning rate; by default the clients', scheduled")
]
Seed = Annotated[int | None, Field(ge=0, description="of batches and dropout; by default the run's")]


@dataclass(frozen=True)
class Retrainable(Simulated):
    """A simulated run whose models are trained further."""

    def trained(self, name: str) -> TrainedModel:
        """Model by name: the server's (else the only global model), a client's own, or the global one of a type.

        Raises:
            ConfigError: The model is unknown.
            RunError: The model is missing or damaged.
        """
        types = self.run.global_weights
        if name == SERVER and self.experiment.server is not None:
            return self._server()
        if name in self.keepers:
            member = self.federation.members[name]
            return self._of_member(name, self.keepers[name], member, self.run.client_model(name))
        if name in types or (name == SERVER and len(types) == 1):
            return self._global(name if name in types else next(iter(types)), name)
        valid = [*([] if name == SERVER else [SERVER]), *self.keepers, *types]
        lacks = f"no server model and {len(types)} global models" if name == SERVER else "no model of that name"
        raise ConfigError(f"of {name}: run '{self.run.folder}' has {lacks}; {nearest(name, valid)}")

    @cached_property
    def keepers(self) -> dict[str, int]:
        """Client that keeps a model -> its round."""
        if not self.run.has_client_models:
            return {}
        return {client: version[0] for client, version in self.run.clients.items()}

    def require_judges(self, trained: TrainedModel) -> dict[str, Member]:
        """Clients that can evaluate the model; raises ConfigError if there are none."""
        members = self.judges(trained)
        if not members:
            raise ConfigError(
                f"no client of '{self.run.folder}' has test samples of the task, modalities and classes of "
                f"'{trained.name}'; choose another model"
            )
        return members


class Retrain(Analysis):
    """Re-train some layers of a model on clients' data, and see what becomes of it at every client. Simulations.

    With the clients' own task, the rest frozen. Batches are drawn, and learning rates are, as in the round after the
    model's last. The optimiser is new.
    """

    of: str = Field(default="server", description="server, a client that keeps a model, each of those, or a group")
    layers: str = Field(default="all", description="what is trained: all, shallow or deep layers")
    depth: str | int | None = Field(
        default=None, description="number of shallow layers, K or NAME=K,...; by default half"
    )
    on: str = Field(default="each", description="data: of a client, of each in turn, or the union of all")
    steps: int = Field(default=500, ge=0, description="optimiser steps")
    lr: LearningRate = None
    seed: Seed = None
    model: ModelName = "last"

    def answer(self, run: Run) -> AnalysisResult:
        depth = None if self.depth is None else depth_in(str(self.depth))
        plan = Plan(self.layers, depth, steps=self.steps, lr=self.lr, seed=self.seed)
        return run_retraining(Retrainable(run, self.model), self.of, self.on, plan)


class Distortion(Analysis):
    """Measure how clients' local training takes paired representations of a model apart. Simulations.

    Similarity is the mean over a client's test samples, and over pairs of modalities, of the cosine between the two
    representations. Training is that of the round after the model's last, with a new optimiser and without what a
    method adds to the task.
    """

    of: str = Field(default="server", description="server, or a group's global model")
    steps: int | None = Field(default=None, ge=0, description="optimiser steps; by default a round's")
    lr: LearningRate = None
    seed: Seed = None
    model: ModelName = "last"

    def answer(self, run: Run) -> AnalysisResult:
        plan = Plan(steps=self.steps, lr=self.lr, seed=self.seed)
        return run_distortion(Retrainable(run, self.model), self.of, plan)


_T = TypeVar("_T")

PARTS = ("all", "shallow", "deep")

_INNER = "trunk"  # what towers and aligned encoders call the part that extracts features


@dataclass(frozen=True)
class Depths:
    """Where a model's tensors are.

    Attributes:
        layer: name in the state dict -> 0 before the first layer (embedding, stem), then 1, 2, ... for the layers, and
            one more for all behind them: norms, projection, aligner, heads.
        counts: modality -> number of layers of its encoder.
    """

    layer: Mapping[str, int]
    counts: Mapping[str, int]

    def shallow(self, depth: int | Mapping[str, int] | None = None) -> frozenset[str]:
        """Names of the embeddings and the first layers.

        Args:
            depth: how many layers are shallow, for all modalities or by modality; None, or a modality that is not
                named: half of them, at least one.

        Raises:
            ConfigError: an encoder has fewer layers, or the modality is unknown.
        """
        wanted = dict.fromkeys(self.counts, depth) if isinstance(depth, int) else dict(depth or {})
        for name in wanted.keys() - self.counts.keys():
            raise ConfigError(f"depth names '{name}', which the model does not encode; {nearest(name, self.counts)}")
        names: set[str] = set()
        for modality, layers in self.counts.items():
            limit = wanted.get(modality, max(1, layers // 2))
            if not 0 <= limit <= layers:
                raise ConfigError(
                    f"depth {limit}: the encoder of '{modality}' has {layers} layers; give so many or fewer"
                )
            own = [name for name in self.layer if name.startswith(f"encoders.{modality}.")]
            names.update(name for name in own if self.layer[name] <= limit)
        return frozenset(names)


def depth_of(model: Model) -> Depths:
    """The layer of every tensor of a model.

    An encoder's layers are the first module list in its trunk whose members are of one class: the blocks of a
    transformer, the stages of a ResNet. What its trunk registers before them is
    layer 0. Heads, what a method adds and a norm for all modalities are behind the layers of all encoders.

    Raises:
        ConfigError: an encoder has no layers.
    """
    layer: dict[str, int] = {}
    counts: dict[str, int] = {}
    for modality, encoder in model.encoders.items():
        trunk, name, count = _stack(modality, encoder)
        counts[modality], reached = count, False
        for key in encoder.state_dict():  # in the order of registration
            if key.startswith(f"{name}."):
                reached, number = True, 1 + int(key.removeprefix(f"{name}.").partition(".")[0])
            else:
                number = 0 if key.startswith(trunk) and not reached else count + 1
            layer[f"encoders.{modality}.{key}"] = number
    behind = max(counts.values(), default=0) + 1
    return Depths({name: layer.get(name, behind) for name in model.exchanged()}, counts)


def chosen_tensors(model: Model, part: str, depth: int | Mapping[str, int] | None = None) -> frozenset[str]:
    """Names of the tensors in a part of the model: ``all``, those of the ``shallow`` layers, or the others (``deep``).

    Raises:
        ConfigError: no such part, a depth with all layers, or as ``depth_of`` and ``Depths.shallow``.
    """
    if part not in PARTS:
        raise ConfigError(f"layers {part}; {nearest(part, PARTS)}")
    every = frozenset(model.exchanged())
    if part == "all":
        if depth is not None:
            raise ConfigError("depth has no effect with layers all; remove it, or choose shallow or deep")
        return every
    shallow = depth_of(model).shallow(depth)
    return shallow if part == "shallow" else every - shallow


def depth_in(text: str) -> int | dict[str, int]:
    """A number of shallow layers, ``4``, or by modality, ``image=2,text=4``.

    Raises:
        ConfigError: it is neither.
    """
    if text.isdecimal():
        return int(text)
    pairs = [entry.strip().partition("=") for entry in text.split(",")]
    if wrong := ["".join(pair) for pair in pairs if not (pair[0] and pair[2].isdecimal())]:
        raise ConfigError(f"depth {text}: '{wrong[0]}' has no number of layers; give such as 4, or image=2,text=4")
    return {name: int(number) for name, _, number in pairs}


def _stack(modality: str, encoder: nn.Module) -> tuple[str, str, int]:
    """Prefix of the innermost trunk within the encoder, name of its list of layers, and their number."""
    prefix, inner = "", encoder
    # an aligned encoder has a trunk that has one itself
    while isinstance(trunk := getattr(inner, _INNER, None), nn.Module):
        prefix, inner = f"{prefix}{_INNER}.", trunk
    for name, module in inner.named_modules():
        if isinstance(module, nn.ModuleList) and len({type(member) for member in module}) == 1:
            return prefix, f"{prefix}{name}", len(module)
    raise ConfigError(
        f"the encoder of '{modality}' ({type(encoder).__name__}) has no layers to separate shallow from deep; use "
        "layers all, or an encoder with layers: blocks, vit, bert, transformer or resnet"
    )


Figures = Mapping[str, Mapping[str, float]]
"""Client -> figure (``R@1``) -> value."""

SHOWN_FIGURES = 2
"""Figures that tables and plots show, such as R@1 and R@5; the files have all."""


def figures_of(metrics: Mapping[str, float], primary: str) -> dict[str, float]:
    """``R@K``, mean over directions, for each protocol and K, then galleries; without recalls the main metric.

    Protocols differ as in the metrics: ``R@1``, ``R@1_full``, ``R@1_batch64``; ``gallery`` likewise.
    """
    recalls: dict[str, list[float]] = {}
    galleries: dict[str, list[float]] = {}
    for recall in sorted(find_recalls(metrics), key=lambda recall: (recall.protocol, recall.cutoff)):
        suffix = f"_{recall.protocol}" if recall.protocol else ""
        recalls.setdefault(f"R@{recall.cutoff}{suffix}", []).append(recall.value)
        if not math.isnan(recall.gallery):
            galleries.setdefault(f"gallery{suffix}", []).append(recall.gallery)
    means = {name: fmean(values) for name, values in (recalls | galleries).items()}
    return means or {primary: metrics[primary]}


def names_of(figures: Figures) -> list[str]:
    return list(next(iter(figures.values())))


def with_mean(figures: Figures, name: str) -> list[float]:
    """One figure at every client, and their mean."""
    values = [at_client[name] for at_client in figures.values()]
    return [*values, fmean(values)]


def mean_figures(several: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """The mean over several models, client by client."""
    return {
        client: {name: fmean(figures[client][name] for figures in several) for name in at_client}
        for client, at_client in several[0].items()
    }


def client_matrix(run: str, name: str, models: Sequence[tuple[str, Figures]], notes: Sequence[str] = ()) -> Matrix:
    """One figure of each model (a row) at each client; under it how large the galleries are that a recall is of."""
    first = models[0][1]
    key = f"gallery{''.join(name.partition('_')[1:])}"
    sizes = ", ".join(f"{client} {count(at[key])}" for client, at in first.items() if key in at)
    galleries = [f"Gallery, mean over directions: {sizes}."] if sizes and name.startswith("R@") else []
    values = [with_mean(figures, name) for _, figures in models]
    names, columns = [model for model, _ in models], [*first, "average"]
    return Matrix(f"{run}: {name} at each client", "model", names, columns, values, notes=(*notes, *galleries))


def trainer_of(
    opened: Retrainable, trained: TrainedModel, name: str, training: TrainingSettings, seed: int | None = None
) -> Participant:
    """The model at work: with a fresh optimiser, at the learning rate and the random draws of the next round."""
    run, number = opened.experiment.run, trained.round + 1
    epochs = opened.experiment.algorithm.epochs_a_round
    # a schedule ends with the run: the round after its last has the last rate
    return Participant(
        name=name,
        load_model=lambda weights: with_weights(trained.model, weights),
        clock=Clock(run.seed if seed is None else seed, number, max(run.rounds, number), epochs),
        setup=TrainingSetup(trained.task, trained.head, training, run.precision, run.evaluation_batch),
    )


def figures_at_clients(
    opened: Retrainable, trained: TrainedModel, members: Mapping[str, Member]
) -> dict[str, dict[str, float]]:
    """Client -> figures of the model as it is on that client's test samples."""
    primary = trained.task.primary
    return measured(opened, trained, members, lambda participant, test: figures_of(participant.evaluate(test), primary))


def measured(
    opened: Retrainable,
    trained: TrainedModel,
    members: Mapping[str, Member],
    measure: Callable[[Participant, Samples], _T],
) -> dict[str, _T]:
    """Client -> a measure of the model on its test samples; once for clients that share them."""
    by_samples: dict[int, _T] = {}
    by_client: dict[str, _T] = {}
    for name, member in members.items():
        test = opened.test(trained, member)
        if id(test) not in by_samples:  # a group may have one test set
            by_samples[id(test)] = measure(trainer_of(opened, trained, name, member.settings.training), test)
        by_client[name] = by_samples[id(test)]
    return by_client


@contextlib.contextmanager
def training_alone(model: Model, names: frozenset[str]) -> Iterator[None]:
    """Train nothing of the model but the tensors of these names.

    Batch norms outside keep their running statistics, and normalise by them: a frozen layer is a fixed function.
    """
    trainable = model.trained()
    norms = [(prefix, module) for prefix, module in model.named_modules() if isinstance(module, _BatchNorm)]
    with contextlib.ExitStack() as restore:
        for name in trainable.keys() - names:
            restore.callback(trainable[name].requires_grad_(False).requires_grad_, True)
        for prefix, module in norms:
            if not any(name.startswith(f"{prefix}.") for name in names):
                # before every forward pass, as training calls model.train()
                restore.callback(module.register_forward_pre_hook(_evaluates).remove)
        yield


def _evaluates(module: torch.nn.Module, inputs: object) -> None:
    module.train(False)


EACH, UNION = "each", "union"


@dataclass(frozen=True)
class Plan:
    """How a model is re-trained.

    Attributes:
        layers: ``all``, ``shallow`` or ``deep``.
        depth: number of shallow layers, for all modalities or by modality; None: half of each encoder's.
        steps: optimiser steps; None: ``epochs`` passes over the samples.
        lr: constant learning rate; None: the clients' own, by their schedule.
        seed: of batches and dropout; None: the run's.
    """

    layers: str = "all"
    depth: int | Mapping[str, int] | None = None
    steps: int | None = 500
    epochs: int = 1
    lr: float | None = None
    seed: int | None = None

    def training(self, settings: TrainingSettings) -> TrainingSettings:
        if self.lr is None:
            return settings
        optimizer = settings.optimizer.model_copy(update={"lr": self.lr})
        return settings.model_copy(update={"optimizer": optimizer, "schedule": Schedule()})


@dataclass(frozen=True)
class Retrained:
    """Figures at every client before and after model ``of`` was trained on a client's data, or the ``union``."""

    of: str
    round: int
    on: str
    steps: int
    before: Figures
    after: Figures


class Retrainer:
    """Trains one model again and again, each time from where it was.

    Raises:
        ConfigError: nothing would be trained.
    """

    def __init__(self, opened: Retrainable, trained: TrainedModel, plan: Plan) -> None:
        model = trained.model
        self._opened, self._trained, self._plan = opened, trained, plan
        self.names = chosen_tensors(model, plan.layers, plan.depth)
        own = [value for name, value in model.trained().items() if name in self.names]
        if not own:
            raise ConfigError(f"layers {plan.layers}: '{trained.name}' has no parameters to train in them")
        self.parameters = sum(value.numel() for value in own)
        self._start = {name: value.detach().clone() for name, value in model.exchanged().items()}

    @contextlib.contextmanager
    def retrained(self, name: str, samples: Samples, training: TrainingSettings) -> Iterator[int]:
        """Within the block the model is re-trained on the samples of ``name``; gives the steps that were done.

        Raises:
            DataError: The samples do not fill a batch.
        """
        plan, model = self._plan, self._trained.model
        participant = trainer_of(self._opened, self._trained, name, plan.training(training), plan.seed)
        try:
            # what a simulated client's first step of that round would draw
            with (
                isolated(participant.clock.seed, participant.clock.round, name, "fit", 0),
                training_alone(model, self.names),
            ):
                done = 0 if plan.steps == 0 else participant.fit(samples, epochs=plan.epochs, steps=plan.steps)
            if not done and plan.steps != 0:
                raise DataError(f"the {len(samples)} samples of '{name}' make no batch to train on; leave it out")
            model.zero_grad(set_to_none=True)  # memory that judging has better use for
            model.eval()
            yield done
        finally:
            model.load(self._start)

    def rows(
        self, members: Mapping[str, Member], on: str, figures: Callable[[], Figures] | None = None
    ) -> Iterator[Retrained]:
        """The model before and after it was re-trained on each set of samples.

        Args:
            members: clients that judge.
            on: a client, ``each`` client in turn, or the ``union`` of them.
            figures: what they find of the model as it is; None: their test figures.
        """
        trained, measure = self._trained, figures or partial(figures_at_clients, self._opened, self._trained, members)
        before = measure()
        for name, samples, training in _sets(self._opened, trained, members, on):
            with self.retrained(name, samples, training) as steps:
                after = measure()
            yield Retrained(trained.name, trained.round, name, steps, before, after)


def run_retraining(opened: Retrainable, of: str, on: str, plan: Plan) -> AnalysisResult:
    """Re-train a part of a model with the clients' own task, the rest frozen, and judge it at every client.

    Batches are drawn, and learning rates are, as in the round after the model's last. The optimiser is new.

    Raises:
        ConfigError: no such model, client or layers, or there is nothing to train.
        RunError: a model is missing or damaged.
    """
    rows: list[Retrained] = []
    with cpu_threads(opened.experiment.run.threads):  # as in the run, whose sums depend on their number
        members = _judges(opened, of, on)
        for trained in _models(opened, of):
            retrainer = Retrainer(opened, trained, plan)
            rows += retrainer.rows(members, on)
    name, asked = opened.run.name, {key: getattr(plan, key) for key in ("layers", "depth", "steps", "lr", "seed")}
    content = {"run": name, **asked, "parameters": retrainer.parameters, "rows": list(map(_content, rows))}
    return matrices_result(name, content, _matrices(name, plan.layers, retrainer.parameters, rows))


def _models(opened: Retrainable, of: str) -> Iterator[TrainedModel]:
    if of == EACH and not opened.keepers:
        raise ConfigError(f"of each: clients of '{opened.run.folder}' keep no models; give of server")
    return map(opened.trained, opened.keepers) if of == EACH else iter([opened.trained(of)])


def _sets(
    opened: Retrainable, trained: TrainedModel, members: Mapping[str, Member], on: str
) -> Iterator[tuple[str, Samples, TrainingSettings]]:
    if on == UNION:
        together = union([opened.train(trained, member) for member in members.values()])
        yield UNION, together, next(iter(members.values())).settings.training
        return
    for name in members if on == EACH else [on]:
        yield name, opened.train(trained, members[name]), members[name].settings.training


def _judges(opened: Retrainable, of: str, on: str) -> dict[str, Member]:
    """The clients that all models are judged at."""
    judges = {trained.name: opened.require_judges(trained) for trained in _models(opened, of)}
    first, members = next(iter(judges.items()))
    for other, others in judges.items():
        if others.keys() != members.keys():
            raise ConfigError(
                f"of each: '{first}' and '{other}' differ in task, modalities or classes, so that no client can "
                "judge both; name one client at a time"
            )
    if on not in (EACH, UNION, *members):
        raise ConfigError(f"on {on}: no client of the task of '{first}'; {nearest(on, [EACH, UNION, *members])}")
    return members


# ---- what is shown


def _content(row: Retrained) -> dict[str, Any]:
    def means(figures: Figures) -> dict[str, float]:
        return {name: with_mean(figures, name)[-1] for name in names_of(figures)}

    return vars(row) | {"mean": {"before": means(row.before), "after": means(row.after)}}


def _matrices(run: str, layers: str, parameters: int, rows: Sequence[Retrained]) -> list[Matrix]:
    """One a figure: each model before, then after it was re-trained on each set."""
    models: list[tuple[str, Figures]] = []
    for (of, number, before), again in groupby(rows, key=lambda row: (row.of, row.round, row.before)):
        models.append((f"{of}, round {number}", before))
        models += [(f"{of}, on {row.on}, {row.steps} steps", row.after) for row in again]
    note = f"Re-trained: {count(parameters)} parameters ({layers} layers)."
    return [client_matrix(run, name, models, (note,)) for name in names_of(rows[0].before)[:SHOWN_FIGURES]]


_SIMILARITY = "similarity"


def run_distortion(opened: Retrainable, of: str = SERVER, plan: Plan | None = None) -> AnalysisResult:
    """Let every client train a model on its task alone, and compare what becomes of it at every client.

    Raises:
        ConfigError: the model has one modality, or the run's method has no length of local training.
        RunError: a model is missing or damaged.
    """
    algorithm, plan = opened.experiment.algorithm, plan or Plan(steps=None)
    if plan.steps is None:
        training = algorithm.local_training
        if training is None:
            name = algorithm.component_name()
            raise ConfigError(f"algorithm '{name}' has no length of local training; set steps")
        # a method that counts a round in steps does as many, in however many passes
        plan = replace(plan, steps=training.steps, epochs=training.epochs)
    with cpu_threads(opened.experiment.run.threads):
        trained = opened.trained(of)
        if len(trained.settings.encoders) < 2:
            (modality,) = trained.settings.encoders
            raise ConfigError(
                f"'{trained.name}' encodes '{modality}' only; distortion is of the similarity of two modalities: give "
                "a model that has them with of"
            )
        members = opened.require_judges(trained)

        def figures() -> Figures:
            similarities, recalls = (
                measured(opened, trained, members, similarity),
                figures_at_clients(opened, trained, members),
            )
            return {client: {_SIMILARITY: similarities[client], **recalls[client]} for client in members}

        rows = list(Retrainer(opened, trained, plan).rows(members, EACH, figures))
    return distortion_result(opened.run.name, rows)


def similarity(participant: Participant, samples: Samples) -> float:
    """Mean cosine of a sample's representations in two modalities: over samples, then over pairs of modalities."""
    values = [of_modality.double() for of_modality in participant.represent(samples).values()]
    # of unit vectors, so that products are cosines
    means = [torch.linalg.vecdot(first, second).mean() for first, second in combinations(values, 2)]
    return float(torch.stack(means).mean())


def distortion_result(run: str, rows: Sequence[Retrained]) -> AnalysisResult:
    """``rows``: one for each client that trained; ``decrease`` is by who trained, then by who judged."""
    clients, first = [row.on for row in rows], rows[0]
    decrease = {
        row.on: {client: row.before[client][_SIMILARITY] - row.after[client][_SIMILARITY] for client in clients}
        for row in rows
    }
    mean = {judged: fmean(of_client[judged] for of_client in decrease.values()) for judged in clients}
    content = {
        "run": run,
        "of": first.of,
        "round": first.round,
        "steps": dict(zip(clients, (row.steps for row in rows), strict=True)),
        "decrease": decrease,
        "mean_decrease": mean,
        "overall_decrease": fmean(mean.values()),
        "before": _side(first.before),
        "after": dict(zip(clients, (_side(row.after) for row in rows), strict=True)),
    }
    return matrices_result(run, content, _distortion_matrices(run, rows, decrease, mean))


def _recall_names(figures: Figures) -> list[str]:
    return [name for name in names_of(figures) if name != _SIMILARITY]


def _side(figures: Figures) -> dict[str, Any]:
    names = _recall_names(figures)
    return {
        _SIMILARITY: {client: at[_SIMILARITY] for client, at in figures.items()},
        "figures": {client: {name: at[name] for name in names} for client, at in figures.items()},
        "mean": {name: with_mean(figures, name)[-1] for name in names},
    }


def _distortion_matrices(
    run: str, rows: Sequence[Retrained], decrease: Mapping[str, Mapping[str, float]], mean: Mapping[str, float]
) -> list[Matrix]:
    """The decrease of similarity, then a matrix a figure."""
    first, after = rows[0], mean_figures([row.after for row in rows])
    note = (
        f"Mean cosine of paired representations of {first.of} (round {first.round}) before minus after local "
        "training; positive: distorted."
    )
    names = [*(f"on {trained}" for trained in decrease), "average"]
    values = [list(of_client.values()) for of_client in (*decrease.values(), mean)]
    title, columns = f"{run}: distortion by local training", [f"test on {client}" for client in first.before]
    falls = Matrix(title, "re-trained", names, columns, values, digits=4, is_change=True, notes=(note,))
    sides = [(f"{first.of}, round {first.round}", first.before), *((f"on {row.on}", row.after) for row in rows)]
    sides.append(("average of re-trained", after))
    return [falls, *(client_matrix(run, name, sides) for name in _recall_names(first.before)[:SHOWN_FIGURES])]
