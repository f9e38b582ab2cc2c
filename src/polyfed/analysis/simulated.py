"""A simulated run opened with everybody's private data: its models are trained further and judged at every client."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.core.errors import ConfigError, nearest
from polyfed.data.samples import Samples
from polyfed.federation.membership import Member
from polyfed.federation.participant import Participant
from polyfed.federation.population import Population
from polyfed.federation.server import loaded
from polyfed.federation.settings import TrainingSettings
from polyfed.federation.trainer import Clock
from polyfed.models.model import Model, ModelSettings
from polyfed.reporting.recalls import find_recalls
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER
from polyfed.tasks.task import Task

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """A trained model of a run.

    Attributes:
        name: ``server``, a type of clients, or a client.
        round: after which its weights are.
        settings: its architecture.
        task: what it was trained for.
        head: name of the task's head.
        classes: target -> names of the classes that it knows.
        model: the model itself, on the device, in evaluation mode.
    """

    name: str
    round: int
    settings: ModelSettings
    task: Task
    head: str
    classes: Mapping[str, tuple[str, ...]]
    model: Model


@dataclass(frozen=True)
class Simulated:
    """A run whose clients were simulated, and all that they hold.

    Attributes:
        run: opened.
        which: ``last`` or ``best`` server model.

    Raises:
        ConfigError: its clients live elsewhere, or the device is not there.
    """

    run: Run
    which: str = "last"

    def __post_init__(self) -> None:
        if not self.experiment.clients:
            raise ConfigError(
                f"the clients of '{self.run.folder}' live at other sites, and so do their data; give a simulated run"
            )
        _ = self.run.place

    @property
    def experiment(self) -> Experiment:
        """Settings of the run."""
        return self.run.experiment

    @property
    def federation(self) -> Population:
        """Data and models of everybody."""
        return self.run.federation

    # ---- models

    def subject(self, name: str) -> Subject:
        """``server``: the server's model, or the only global model; a client: what it kept; a type: its global model.

        Raises:
            ConfigError: there is none of that name.
            RunError: it is missing or damaged.
        """
        if name == SERVER:
            return self._server()
        if name in self.keepers:
            return self.kept(name)
        if name in self.run.global_weights:
            return self._global(name)
        valid = [SERVER, *self.keepers, *self.run.global_weights]
        raise ConfigError(f"--of {name}: run '{self.run.folder}' has no model of that name; {nearest(name, valid)}")

    def globals(self) -> Iterator[Subject]:
        """The server's model, and the global models of types that are not shown by it."""
        server = self._server() if self.experiment.server is not None else None
        if server is not None:
            yield server
        for kind, weights in self.run.global_weights.items():
            if server is None or not _holds(weights, server.model.state_dict()):
                yield self._global(kind)

    @cached_property
    def keepers(self) -> Mapping[str, int]:
        """Client that keeps a model -> round of the last step that it is of."""
        if "model" not in self.experiment.algorithm.keeps:
            return {}
        return {client: version[0] for client, version in self.run.kept_clients().versions.items()}

    def kept(self, client: str) -> Subject:
        """The model that a client kept."""
        model = self.run.kept_clients().model(client)
        return self._of_member(client, self.keepers[client], self.federation.members[client], model)

    @property
    def is_server_untrained(self) -> bool:
        """Whether the server's model is as it was initialised: nothing in the method trains it."""
        if self.experiment.server is None:
            return False
        return _holds(self._server().model.state_dict(), self.federation.server_model().state_dict())

    def _server(self) -> Subject:
        if self.experiment.server is None:
            if len(self.run.global_weights) == 1:
                return self._global(next(iter(self.run.global_weights)), SERVER)
            valid = [*self.run.global_weights, *self.keepers]
            raise ConfigError(
                f"run '{self.run.folder}' has no server model and {len(self.run.global_weights)} global models, so "
                f"--of server says not which; {nearest(SERVER, valid)}"
            )
        server = self.run.server_model(self.which)
        server.warn_if_untrained()
        saved = server.saved
        return Subject(SERVER, server.round, saved.settings, saved.task, server.head_name, server.classes, server.model)

    def _global(self, kind: str, name: str | None = None) -> Subject:
        member = self.federation.members[self.run.types[kind].clients[0].id]
        return self._of_member(name or kind, self.run.checkpoint.round, member, self.run.global_model(kind))

    def _of_member(self, name: str, number: int, member: Member, model: Model) -> Subject:
        classes = self.federation.train(member).classes
        return Subject(name, number, member.model, member.settings.task, member.head, classes, model)

    # ---- clients

    def suited(self, subject: Subject) -> dict[str, Member]:
        """Clients that can judge the model: with its task, modalities and classes, and test samples."""
        return {name: member for name, member in self.federation.members.items() if self._suits(subject, member)}

    def comparable(self, subject: Subject) -> dict[str, Member]:
        """As ``suited``.

        Raises:
            ConfigError: there is none.
        """
        found = self.suited(subject)
        if not found:
            raise ConfigError(
                f"no client of '{self.run.folder}' has test samples of the task, modalities and classes of "
                f"'{subject.name}'; choose another model"
            )
        return found

    def _suits(self, subject: Subject, member: Member) -> bool:
        if member.settings.task != subject.task or set(member.model.encoders) != set(subject.settings.encoders):
            return False
        if member.settings.test_split is None:
            return False
        test, target = self.test(subject, member), getattr(subject.task, "target", "")
        return len(test) > 0 and test.classes.get(target) == subject.classes.get(target)

    def train(self, subject: Subject, member: Member) -> Samples:
        """A client's training samples in the views of a model."""
        return self.federation.train(member, None if member.model == subject.settings else subject.settings)

    def test(self, subject: Subject, member: Member) -> Samples:
        """Its test samples likewise."""
        found = self.federation.test(member, None if member.model == subject.settings else subject.settings)
        assert found is not None
        return found

    # ---- work

    def participant(
        self, subject: Subject, name: str, training: TrainingSettings, seed: int | None = None
    ) -> Participant:
        """The model at work: with a fresh optimiser, at the learning rate and the random draws of the next round."""
        run, number = self.experiment.run, subject.round + 1
        return Participant(
            name=name,
            load_model=lambda weights: loaded(subject.model, weights),
            clock=Clock(
                run.seed if seed is None else seed,
                number,
                max(run.rounds, number),
                self.experiment.algorithm.epochs_a_round,
            ),
            objective=subject.task,
            head_name=subject.head,
            training=training,
            precision=run.precision,
            evaluation_batch=run.evaluation_batch,
        )

    def figures(self, subject: Subject, members: Mapping[str, Member]) -> dict[str, dict[str, float]]:
        """Client -> figures of the model as it is on that client's test samples."""
        primary = subject.task.primary
        return self.measured(
            subject, members, lambda participant, test: figures_of(participant.evaluate(test), primary)
        )

    def measured(
        self, subject: Subject, members: Mapping[str, Member], measure: Callable[[Participant, Samples], T]
    ) -> dict[str, T]:
        """Client -> a measure of the model on its test samples; once for clients that share them."""
        known: dict[int, T] = {}
        found: dict[str, T] = {}
        for name, member in members.items():
            test = self.test(subject, member)
            if id(test) not in known:
                known[id(test)] = measure(self.participant(subject, name, member.settings.training), test)
            found[name] = known[id(test)]
        return found


def figures_of(metrics: Mapping[str, float], primary: str) -> dict[str, float]:
    """``R@K``, mean over directions, for each protocol and K, then galleries; without recalls the main metric.

    Protocols are told apart as in the metrics: ``R@1``, ``R@1_full``, ``R@1_batch64``; ``gallery`` likewise.
    """
    by_name: dict[str, list[float]] = {}
    galleries: dict[str, list[float]] = {}
    for recall in sorted(find_recalls(metrics), key=lambda recall: (recall.protocol, recall.cutoff)):
        suffix = f"_{recall.protocol}" if recall.protocol else ""
        by_name.setdefault(f"R@{recall.cutoff}{suffix}", []).append(recall.value)
        if not math.isnan(recall.gallery):
            galleries.setdefault(f"gallery{suffix}", []).append(recall.gallery)
    found = {name: fmean(values) for name, values in (by_name | galleries).items()}
    return found or {primary: metrics[primary]}


@contextlib.contextmanager
def only(model: Model, names: frozenset[str]) -> Iterator[None]:
    """Train nothing of the model but the tensors of these names.

    Batch norms outside keep their running statistics, and normalise by them: a frozen layer is a fixed function.
    """
    frozen = [value for name, value in model.named_parameters() if value.requires_grad and name not in names]
    norms = [
        module
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not any(name.startswith(f"{prefix}.") for name in names)
    ]
    hooks = [module.register_forward_pre_hook(_evaluates) for module in norms]
    for value in frozen:
        value.requires_grad_(False)
    try:
        yield
    finally:
        for value in frozen:
            value.requires_grad_(True)
        for hook in hooks:
            hook.remove()


def _evaluates(module: torch.nn.Module, inputs: object) -> None:
    module.train(False)


def _holds(weights: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> bool:
    """Whether all tensors of ``part`` are among ``weights``, with equal values."""
    return all(
        name in weights and weights[name].shape == value.shape and torch.equal(weights[name].cpu(), value.cpu())
        for name, value in part.items()
    )
