"""A simulated run opened with all private data, to train its models further and evaluate them at every client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.data.samples import Samples
from polyfed.federation.membership import Member
from polyfed.federation.population import Population
from polyfed.models.model import Model, ModelSettings
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER
from polyfed.tasks.task import Task


@dataclass(frozen=True)
class TrainedModel:
    """A trained model of a run.

    Attributes:
        name: ``server``, a type of clients, or a client.
        round: Round of its weights.
        settings: Its architecture.
        task: The task of its training.
        head: Name of the task's head.
        classes: Target -> names of its classes.
        model: The model itself, on the device, in evaluation mode.
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
    """A run with simulated clients and all their data.

    Attributes:
        run: The opened run.
        which: ``last`` or ``best`` server model, or the number of a round.

    Raises:
        ConfigError: Its clients are at other sites, or the device is missing.
    """

    run: Run
    which: str = "last"

    def __post_init__(self) -> None:
        if not self.experiment.clients:
            raise ConfigError(
                f"the clients of '{self.run.folder}' are at other sites, with their data; give a simulated run"
            )
        _ = self.run.place

    @property
    def experiment(self) -> Experiment:
        return self.run.experiment

    @property
    def federation(self) -> Population:
        return self.run.federation

    # ---- models

    def globals(self) -> Iterator[TrainedModel]:
        """The server's model, and global models of types that differ from it."""
        server = self._server() if self.experiment.server is not None else None
        if server is not None:
            yield server
        for client_type, weights in self.run.global_weights.items():
            # a server that is the average of a type is not evaluated twice
            if server is None or not _holds(weights, server.model.exchanged()):
                yield self._global(client_type)

    @property
    def is_server_untrained(self) -> bool:
        """True if the server's model still has its initial weights, as the method does not train it."""
        if self.experiment.server is None:
            return False
        return _holds(self._server().model.exchanged(), self.federation.server_model().exchanged())

    def _server(self) -> TrainedModel:
        server = self.run.server_model(self.which)
        server.warn_if_untrained()
        head = str(server.config.get("head", ""))
        return TrainedModel(SERVER, server.round, server.settings, server.task, head, server.classes, server.model)

    def _global(self, client_type: str, name: str | None = None) -> TrainedModel:
        number = self.run.checkpoint.round
        if self.which.isdecimal() and int(self.which) != number:
            raise ConfigError(f"model {self.which}: the global model of '{client_type}' is of round {number} alone")
        member = self.federation.members[self.run.types[client_type].clients[0].id]
        return self._of_member(name or client_type, number, member, self.run.global_model(client_type))

    def _of_member(self, name: str, number: int, member: Member, model: Model) -> TrainedModel:
        classes = self.federation.train(member).classes
        return TrainedModel(name, number, member.model, member.settings.task, member.head, classes, model)

    # ---- clients

    def judges(self, trained: TrainedModel) -> dict[str, Member]:
        """Clients that can evaluate the model: with its task, modalities and classes, and test samples."""
        suited = {}
        for name, member in self.federation.members.items():
            like = member.settings.task == trained.task and set(member.model.encoders) == set(trained.settings.encoders)
            if like and member.settings.test_split is not None:
                test = self.test(trained, member)
                targets = trained.task.class_targets
                if len(test) > 0 and all(test.classes.get(name) == trained.classes.get(name) for name in targets):
                    suited[name] = member
        return suited

    def train(self, trained: TrainedModel, member: Member) -> Samples:
        # None: the client's own views, which are open already
        return self.federation.train(member, None if member.model == trained.settings else trained.settings)

    def test(self, trained: TrainedModel, member: Member) -> Samples:
        samples = self.federation.test(member, None if member.model == trained.settings else trained.settings)
        assert samples is not None
        return samples


def _holds(weights: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> bool:
    """True if all tensors of ``part`` are in ``weights`` with equal values."""
    return all(
        name in weights and weights[name].shape == value.shape and torch.equal(weights[name].cpu(), value.cpu())
        for name, value in part.items()
    )
