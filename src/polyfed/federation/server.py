"""The server: its model, its data, and the weights it aggregates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from polyfed.aggregation.averaging import Averaging
from polyfed.aggregation.mean import GlobalModel, Update
from polyfed.core.errors import ConfigError, PayloadError
from polyfed.data.samples import Samples
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Reply, ReplyCheck
from polyfed.federation.participant import Participant
from polyfed.federation.types import Blueprint, ClientType, Outline, client_types, differently_named, outline_of
from polyfed.models.frozen import frozen_parts
from polyfed.models.model import Model
from polyfed.wire.payload import Representations, Weights

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Server(Participant):
    """The server during a run. It knows clients by their ``ClientInfo`` only.

    Attributes:
        clients: everybody in the federation, in client order.
        validation: samples for model selection.
        test: samples that are only ever reported on.
        counted: client -> samples that it counts for in averages, where these may be fewer than it joined with.
        public_order: identifies the public set and its order.
        blueprint: gives the initial tensors of every architecture among the clients, and their places.
        has_model: whether the federation has a server model at all.
        weights: global models for methods that exchange weights: type of client -> tensors by name.
        state: further named tensors that last for the run.
        measured: is given metrics of training, which are the current round's.
        arrays: named matrices of the current round, for plots: (values [clients, n], client ids).
    """

    clients: tuple[ClientInfo, ...]
    public_order: str
    blueprint: Callable[[], Mapping[str, Blueprint]]
    counted: Mapping[str, int] = field(default_factory=dict)
    validation: Samples | None = None
    test: Samples | None = None
    has_model: bool = False
    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    measured: Callable[[Mapping[str, float]], None] = lambda metrics: None
    arrays: dict[str, tuple[Tensor, list[str]]] = field(default_factory=dict)

    @cached_property
    def device(self) -> torch.device:
        """Where the model is; the CPU if there is none."""
        return self.model.device if self.has_model else torch.device("cpu")

    def begin(self, round_number: int) -> None:
        """Enter a round."""
        self.clock = replace(self.clock, round=round_number)
        self.optimizer_state = self.trainer_states()
        self._trainers = {}  # they hold the clock of the round before; their states go on
        self.arrays = {}

    def snapshot(self) -> dict[str, Mapping[str, Tensor]]:
        """All that lasts, as named groups of named tensors."""
        # the part before the colon says what the group is; type names may have colons of their own
        groups: dict[str, Mapping[str, Tensor]] = {f"weights:{name}": value for name, value in self.weights.items()}
        if self.has_model:
            groups["model"] = self.model.exchanged()
        groups |= {f"optimizer:{name}": state for name, state in self.trainer_states().items()}
        return groups | {f"state:{name}": value for name, value in self.state.items()}

    def restore(self, round_number: int, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Be as after ``round_number``, given its snapshot."""
        if "model" in groups:
            self.load_weights(groups["model"])
        kinds: dict[str, dict[str, dict[str, Tensor]]] = {"weights": {}, "optimizer": {}, "state": {}}
        for group, tensors in groups.items():
            kind, _, name = group.partition(":")
            if kind in kinds:
                kinds[kind][name] = dict(tensors)
        self.optimizer_state, self.state = kinds["optimizer"], kinds["state"]
        self.weights = {
            name: {key: value.to(self.device) for key, value in tensors.items()}
            for name, tensors in kinds["weights"].items()
        }
        self.clock = replace(self.clock, round=round_number)

    # ---- global models, for methods that exchange weights

    @cached_property
    def blueprints(self) -> Mapping[str, Blueprint]:
        """Architecture -> initial tensors and their places."""
        return self.blueprint()

    @cached_property
    def types(self) -> dict[str, ClientType]:
        """Types of clients by name: those of one architecture, task and classes share a global model."""
        return client_types(self.clients)

    def type_of(self, client: ClientInfo) -> str:
        """Name of a client's type."""
        return next(name for name, kind in self.types.items() if kind.architecture == client.architecture)

    def weight(self, *clients: ClientInfo) -> int:
        """Samples that clients count for in averages, together."""
        return sum(self.counted.get(client.id, client.samples) for client in clients)

    def shapes(self, kind: str) -> dict[str, torch.Size]:
        """Names and shapes of the tensors of a type's model."""
        tensors = self.blueprints[self.types[kind].architecture].tensors
        return {name: value.shape for name, value in tensors.items()}

    def outline(self, kind: str) -> Outline:
        """What the tensors of a type's model are like."""
        return outline_of(self.blueprints[self.types[kind].architecture].tensors)

    @property
    def global_models(self) -> dict[str, GlobalModel]:
        """Type -> its global model, as aggregation sees it."""
        return {
            name: GlobalModel(
                kind.modalities,
                self.blueprints[kind.architecture].places,
                self.shapes(name),
                tuple(client.id for client in kind.clients),
            )
            for name, kind in self.types.items()
        }

    def share_weights(self, averaging: Averaging | None = None) -> None:
        """Start the global models: tensors of one name and shape start equal, as the server's own where it has them.

        Raises:
            ConfigError: the server has a model, and no type of clients trains such a model; or types that are to
                average layers with each other cannot.
        """
        if averaging is not None:
            averaging.require(self.global_models)
        common: dict[tuple[str, torch.Size], Tensor] = {}
        if self.has_model:
            common = {(name, value.shape): value for name, value in self.model.exchanged().items()}
        self.weights = {}
        for kind, members in self.types.items():
            tensors = self.blueprints[members.architecture].tensors
            # the first type that has a tensor gives it to all others
            first = {name: common.setdefault((name, value.shape), value) for name, value in tensors.items()}
            self.weights[kind] = {name: value.to(self.device, copy=True) for name, value in first.items()}
        if averaging is None or not averaging.between_types:
            self._warn_of_types_apart()
        if self.has_model:
            _ = self.own_type  # refused before the first round if there is none

    def _warn_of_types_apart(self) -> None:
        for names in differently_named(self.types):
            _log.warning(
                "clients of types %s have one model, one task and equally many classes, but under other names, or over "
                "other frozen word vectors, so they are not averaged; if they should be, make names and vectors alike",
                " and ".join(f"'{name}'" for name in names),
            )

    @cached_property
    def own_type(self) -> str:
        """The type of clients whose global model is the server's own.

        Raises:
            ConfigError: there is none.
        """
        own = {name: value.shape for name, value in self.model.exchanged().items()}
        frozen, missing = frozen_parts(self.model), ""
        # first those whose head is the server's: another type may have the same shapes
        for kind in sorted(self.types, key=lambda kind: not self.types[kind].has_head(self.head_name)):
            shapes = self.shapes(kind)
            wrong = [name for name, shape in own.items() if shapes.get(name) != shape]
            wrong += [name for name, part in frozen.items() if part.digest not in self.types[kind].architecture]
            if not wrong:
                return kind
            missing = missing or f"'{wrong[0]}' of the server is not in clients of type '{kind}'"
        raise ConfigError(
            f"server.model must be the model of one type of clients to show its global model, but {missing}; "
            "give it that model and task (its source may be another one), or leave out the 'server' section"
        )

    def represent_public(self, count: int | None = None, *, training: bool = False) -> Representations:
        """Representations by the current model of the public samples that are exchanged in this round."""
        return Representations(self.represent(self.exchanged(count), training=training), order=self.order(count))

    def order(self, count: int | None = None) -> str:
        """Identifies the public samples that are exchanged in this round, and their order."""
        is_all = count is None or count >= len(self.public_set)
        return self.public_order if is_all else f"{self.public_order}/{self.clock.round}/{count}"

    def weights_for(self, client: ClientInfo) -> Weights:
        """The global model of a client's type."""
        return Weights(self.weights[self.type_of(client)])

    def weights_check(self, part: Collection[str] | None = None) -> ReplyCheck:
        """Raises PayloadError for a reply whose ``weights`` are not all (or the ``part``) of its sender's tensors.

        Types of numbers must be the server's as well as shapes: a mean takes on that of the first tensor in it.
        """

        @cache  # of a type, while one ask lasts
        def outline(kind: str) -> Outline:
            return {name: shape for name, shape in self.outline(kind).items() if part is None or name in part}

        def check(reply: Reply) -> None:
            expected = outline(self.type_of(reply.sender))
            # names too: a tensor too many would be averaged into the model
            received = outline_of(reply.weights)
            if received != expected:
                first = min(name for name, _ in set(received.items()) ^ set(expected.items()))
                fault = "do not match the architecture" if part is None else "are not the part that was asked for"
                raise PayloadError(f"weights {fault}, first at '{first}'")

        return check

    def average_weights(
        self,
        replies: Iterable[Reply],
        asked: Sequence[ClientInfo],
        averaging: Averaging,
        share: Callable[[Reply], float] = lambda reply: float(reply.num_examples),
    ) -> None:
        """Fold replies with ``weights`` into the global models as they come.

        Args:
            replies: one by one; none is held.
            asked: the clients that were asked; sequential means need their sizes before the first reply.
            averaging: what types average with each other, and how the global models follow.
            share: what a reply counts for; by default ``num_examples``.
        """
        sizes: dict[str, float] = {}
        for client in asked:
            sizes[self.type_of(client)] = sizes.get(self.type_of(client), 0.0) + self.weight(client)

        def update(reply: Reply) -> Update:
            return self.type_of(reply.sender), reply.weights, share(reply)

        # unlike a loop, map lets go of a reply before it asks for the next
        averages = averaging.average(self.weights, self.global_models, map(update, replies), sizes)
        self.update_weights(averaging.server_optimizer.step(self.weights, averages, self.state))

    def update_weights(self, new: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace global models by type, and show the server's own model that of its type."""
        self.weights |= {kind: dict(tensors) for kind, tensors in new.items()}
        if self.has_model and self.weights:
            # the type may have tensors that the server has not, such as modules that a method adds
            shown = self.weights[self.own_type]
            self.model.load({name: shown[name] for name in self.model.exchanged()})

    def record(self, **metrics: float) -> None:
        """Tell of training metrics of this round."""
        if metrics:
            self.measured(metrics)


def no_model(weights: Mapping[str, Tensor] | None) -> Model:
    """What a server without a model provides: an error that says so."""
    raise ConfigError("this method needs a server model; add a 'server' section")


def loaded(model: Model, weights: Mapping[str, Tensor] | None) -> Model:
    """The model, with the given weights or else with its own."""
    if weights is not None:
        model.load(weights)
    return model
