"""The server: its model, its data, and the global models that it averages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from polyfed.aggregation.averaging import Averages, Averaging, Mean
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Samples
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort
from polyfed.federation.participant import Participant
from polyfed.federation.types import ClientType, GlobalModels, differently_named
from polyfed.models.frozen import frozen_parts
from polyfed.models.model import Model
from polyfed.wire.payload import Representations, Weights

_log = logging.getLogger(__name__)


@dataclass
class Diagnostics:
    """Figures of a round other than its results.

    Attributes:
        record: receives metrics of training of the current round.
        arrays: named matrices of the current round, for plots: (values [clients, n], client ids).
        updating: observer of the next new global models, by type, just before they replace the old ones.
    """

    record: Callable[[Mapping[str, float]], None] = lambda metrics: None
    arrays: dict[str, tuple[Tensor, list[str]]] = field(default_factory=dict)
    updating: Callable[[Mapping[str, Mapping[str, Tensor]]], None] | None = None


@dataclass(kw_only=True)
class Server(Participant):
    """The server during a run. It has only the ``ClientInfo`` of its clients.

    Attributes:
        global_models: global models by type, for methods that exchange weights.
        validation: samples for the choice of a model.
        test: samples that are only reported on.
        state: further named tensors that last for the run.
        diagnostics: metrics and matrices of the current round.
    """

    global_models: GlobalModels
    validation: Samples | None = None
    test: Samples | None = None
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    _broadcast: dict[str, Weights] = field(default_factory=dict)  # type -> what its clients got in this round

    @property
    def has_model(self) -> bool:
        """True if the federation has a server model."""
        return self.load_model is not no_model

    @cached_property
    def device(self) -> torch.device:
        """Where the model is; the CPU if there is none."""
        return self.model.device if self.has_model else torch.device("cpu")

    def begin(self, round_number: int) -> None:
        """Enter a round."""
        self.clock = replace(self.clock, round=round_number)
        self.optimizers.states = self.optimizers.kept()
        self.optimizers.epochs.losses.clear()
        self.optimizers.trainers = {}  # they hold the clock of the round before; their states go on
        self.diagnostics.arrays, self._broadcast = {}, {}

    def snapshot(self) -> dict[str, Mapping[str, Tensor]]:
        """State that lasts, as named groups of named tensors."""
        # the group precedes the first colon; type names may have colons of their own
        groups: dict[str, Mapping[str, Tensor]] = {f"weights:{name}": value for name, value in self.weights.items()}
        if self.has_model:
            groups["model"] = self.model.exchanged()
        groups |= {f"optimizer:{name}": state for name, state in self.optimizers.kept().items()}
        return groups | {f"state:{name}": value for name, value in self.state.items()}

    def restore(self, round_number: int, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the state after ``round_number`` from its snapshot."""
        if "model" in groups:
            self.load_weights(groups["model"])
        parts: dict[str, dict[str, dict[str, Tensor]]] = {"weights": {}, "optimizer": {}, "state": {}}
        for group, tensors in groups.items():
            part, _, name = group.partition(":")
            if part in parts:
                parts[part][name] = dict(tensors)
        self.optimizers.states, self.state = parts["optimizer"], parts["state"]
        self.global_models.weights = {
            name: {key: value.to(self.device) for key, value in tensors.items()}
            for name, tensors in parts["weights"].items()
        }
        self.clock = replace(self.clock, round=round_number)

    def record(self, **metrics: float) -> None:
        """Record training metrics of this round."""
        if metrics:
            self.diagnostics.record(metrics)

    # ---- the public set

    def represent_public(self, count: int | None = None, *, training: bool = False) -> Representations:
        """Representations by the current model of the public samples that are exchanged in this round."""
        return Representations(self.represent(self.exchanged(count), training=training), order=self.order(count))

    def order(self, count: int | None = None) -> str:
        """Identifies the public samples that are exchanged in this round, and their order."""
        is_all = count is None or count >= len(self.public_set)
        return self.public.order if is_all else f"{self.public.order}/{self.clock.round}/{count}"

    # ---- clients, and global models, for methods that exchange weights

    @property
    def clients(self) -> tuple[ClientInfo, ...]:
        """All clients of the federation, in client order."""
        return self.global_models.clients

    @property
    def types(self) -> dict[str, ClientType]:
        """Types of clients by name: those of one architecture, task and classes share a global model."""
        return self.global_models.types

    @property
    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Type of clients -> tensors of its global model by name."""
        return self.global_models.weights

    def type_of(self, client: ClientInfo) -> str:
        """Name of a client's type."""
        return self.global_models.type_of(client)

    def weight(self, *clients: ClientInfo) -> int:
        """Samples that clients count for in averages, together."""
        return self.global_models.samples(*clients)

    def weights_for(self, client: ClientInfo) -> Weights:
        """The global model of a client's type."""
        name = self.type_of(client)
        known, tensors = self._broadcast.get(name), self.weights[name]
        if known is None or known.tensors is not tensors:
            known = self._broadcast[name] = Weights(tensors)
        return known

    def share_weights(self, averaging: Averaging | None = None) -> None:
        """Start the global models: tensors of one name and shape start equal, as the server's own where it has them.

        Raises:
            ConfigError: the server has a model, and no type of clients trains such a model; or types that are to
                average layers with each other cannot.
        """
        self.global_models.start(self.model.exchanged() if self.has_model else {}, self.device)
        if averaging is not None:
            averaging.require(self.global_models.by_type())
        if averaging is None or not averaging.between_types:
            for names in differently_named(self.types):
                _log.warning(
                    "clients of types %s have one model, one task and equally many classes, but under other names, or "
                    "over other frozen word vectors, so they are not averaged; if they should be, make names and "
                    "vectors alike",
                    " and ".join(f"'{name}'" for name in names),
                )
        if self.has_model:
            _ = self.own_type  # refused before the first round if there is none

    @cached_property
    def own_type(self) -> str:
        """The type of clients whose global model is the server's own.

        Raises:
            ConfigError: there is none.
        """
        own = {name: value.shape for name, value in self.model.exchanged().items()}
        frozen, missing = frozen_parts(self.model), ""
        # first those whose head is the server's: another type may have the same shapes
        for name in sorted(self.types, key=lambda name: not self.types[name].has_head(self.setup.head_name)):
            tensors = self.global_models.initial(name)
            wrong = [key for key, shape in own.items() if key not in tensors or tensors[key].shape != shape]
            wrong += [key for key, part in frozen.items() if part.digest not in self.types[name].architecture]
            if not wrong:
                return name
            missing = missing or f"'{wrong[0]}' of the server is not in clients of type '{name}'"
        raise ConfigError(
            f"server.model must equal the model of one type of clients, whose global model it holds, but {missing}; "
            "give it that model and task (the source may differ), or leave out the 'server' section"
        )

    def new_means(self, averaging: Averaging, cohort: Cohort) -> Mapping[str, Mean]:
        """Type -> empty mean of the weights that its clients train in this round, as the averaging takes it."""
        asked = self.global_models.samples_by_type(cohort.clients)
        return averaging.new_means(self.global_models.by_type(), asked)

    def averaged(self, averaging: Averaging, means: Mapping[str, Mean]) -> Averages:
        """Type -> new global model: the average of the ``new_means``, as the server's optimiser follows it."""
        new = averaging.average(self.global_models.by_type(), means)
        return averaging.server_optimizer.step(self.weights, new, self.state)

    def update_weights(self, new: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace global models by type, and show the server's own model that of its type."""
        updating, self.diagnostics.updating = self.diagnostics.updating, None
        if updating is not None:
            updating(new)
        self.weights.update({name: dict(tensors) for name, tensors in new.items()})
        self._broadcast = {}
        if self.has_model and self.weights:
            # the type may have tensors that the server has not, such as modules that a method adds
            shown = self.weights[self.own_type]
            self.model.load({name: shown[name] for name in self.model.exchanged()})


def no_model(weights: Mapping[str, Tensor] | None) -> Model:
    """Loader of a server without a model, which raises ConfigError."""
    raise ConfigError("this method needs a server model; add a 'server' section")


def with_weights(model: Model, weights: Mapping[str, Tensor] | None) -> Model:
    """The model, with the given weights or else with its own."""
    if weights is not None:
        model.load(weights)
    return model
