"""A simulated run opened with everybody's private data: its models are trained further and judged at every client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polyfed.core.errors import ConfigError, nearest
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
        which: ``last`` or ``best`` server model, or that of a round.

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
        return self.run.experiment

    @property
    def federation(self) -> Population:
        return self.run.federation

    # ---- models

    def trained(self, name: str) -> TrainedModel:
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
        raise ConfigError(f"of {name}: run '{self.run.folder}' has no model of that name; {nearest(name, valid)}")

    def globals(self) -> Iterator[TrainedModel]:
        """The server's model, and the global models of types that are not shown by it."""
        server = self._server() if self.experiment.server is not None else None
        if server is not None:
            yield server
        for client_type, weights in self.run.global_weights.items():
            # a server that is the average of a type is not judged twice
            if server is None or not _holds(weights, server.model.exchanged()):
                yield self._global(client_type)

    @cached_property
    def keepers(self) -> dict[str, int]:
        if not self.run.has_client_models:
            return {}
        return {client: version[0] for client, version in self.run.clients.items()}

    def kept(self, client: str) -> TrainedModel:
        member = self.federation.members[client]
        return self._of_member(client, self.keepers[client], member, self.run.client_model(client))

    @property
    def is_server_untrained(self) -> bool:
        """Whether the server's model is as it was initialised: nothing in the method trains it."""
        if self.experiment.server is None:
            return False
        return _holds(self._server().model.exchanged(), self.federation.server_model().exchanged())

    def _server(self) -> TrainedModel:
        if self.experiment.server is not None:
            server = self.run.server_model(self.which)
            server.warn_if_untrained()
            architecture, head = server.settings, str(server.config.get("head", ""))
            return TrainedModel(SERVER, server.round, architecture, server.task, head, server.classes, server.model)
        if len(self.run.global_weights) == 1:
            return self._global(next(iter(self.run.global_weights)), SERVER)
        valid = [*self.run.global_weights, *self.keepers]
        raise ConfigError(
            f"run '{self.run.folder}' has no server model and {len(self.run.global_weights)} global models, so "
            f"of: server says not which; {nearest(SERVER, valid)}"
        )

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
        """Clients that can judge the model: with its task, modalities and classes, and test samples."""
        suited = {}
        for name, member in self.federation.members.items():
            like = member.settings.task == trained.task and set(member.model.encoders) == set(trained.settings.encoders)
            if like and member.settings.test_split is not None:
                test = self.test(trained, member)
                targets = trained.task.class_targets
                if len(test) > 0 and all(test.classes.get(name) == trained.classes.get(name) for name in targets):
                    suited[name] = member
        return suited

    def require_judges(self, trained: TrainedModel) -> dict[str, Member]:
        """As ``judges``; raises ConfigError if there is none."""
        members = self.judges(trained)
        if not members:
            raise ConfigError(
                f"no client of '{self.run.folder}' has test samples of the task, modalities and classes of "
                f"'{trained.name}'; choose another model"
            )
        return members

    def train(self, trained: TrainedModel, member: Member) -> Samples:
        # None: the client's own views, which are open already
        return self.federation.train(member, None if member.model == trained.settings else trained.settings)

    def test(self, trained: TrainedModel, member: Member) -> Samples:
        samples = self.federation.test(member, None if member.model == trained.settings else trained.settings)
        assert samples is not None
        return samples


def _holds(weights: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> bool:
    """Whether all tensors of ``part`` are among ``weights``, with equal values."""
    return all(
        name in weights and weights[name].shape == value.shape and torch.equal(weights[name].cpu(), value.cpu())
        for name, value in part.items()
    )
