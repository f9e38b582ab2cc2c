"""The server: its model, its data, the weights it aggregates, and what it records of a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from polyfed.data.samples import Samples
from polyfed.errors import ConfigError
from polyfed.federation.client import ClientInfo
from polyfed.federation.party import Party
from polyfed.federation.payload import Representations, Weights
from polyfed.models.model import Model


@dataclass(kw_only=True)
class Server(Party):
    """The server during a run. It knows clients by their ``ClientInfo`` only.

    Attributes:
        clients: everybody in the federation, in client order.
        validation: samples for model selection.
        test: samples that are only ever reported on.
        public_order: identifies the public set and its order.
        blueprint: gives initial tensors by name for every architecture among the clients.
        has_model: whether the federation has a server model at all.
        weights: aggregated tensors by name, for methods that exchange weights.
        state: further named tensors that last for the run.
        records: metrics and events of the current round.
        arrays: named matrices of the current round, for plots: (values [clients, n], client ids).
    """

    clients: tuple[ClientInfo, ...]
    public_order: str
    blueprint: Callable[[], Mapping[str, Mapping[str, Tensor]]]
    validation: Samples | None = None
    test: Samples | None = None
    has_model: bool = False
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, tuple[Tensor, list[str]]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the model is; the CPU if there is none."""
        return self.model.device if self.has_model else torch.device("cpu")

    def begin(self, round_number: int) -> None:
        """Enter a round."""
        self.clock = replace(self.clock, round=round_number)
        self.optimizer_state = self.trainer_states()
        self._trainers = {}
        self.forget_records()

    def forget_records(self) -> None:
        """Drop what has been written to disk."""
        self.records, self.arrays = [], {}

    def snapshot(self) -> dict[str, Mapping[str, Tensor]]:
        """All that lasts, as named groups of named tensors."""
        groups: dict[str, Mapping[str, Tensor]] = {"weights": self.weights}
        if self.has_model:
            groups["model"] = self.model.state_dict()
        groups |= {f"optimizer:{name}": state for name, state in self.trainer_states().items()}
        return groups | {f"state:{name}": value for name, value in self.state.items()}

    def restore(self, round_number: int, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Be as after ``round_number``, given its snapshot."""
        if "model" in groups:
            self.receive(groups["model"])
        self.weights = {name: value.to(self.device) for name, value in groups.get("weights", {}).items()}
        self.optimizer_state = _section(groups, "optimizer:")
        self.state = _section(groups, "state:")
        self.clock = replace(self.clock, round=round_number)

    @cached_property
    def architectures(self) -> Mapping[str, Mapping[str, torch.Size]]:
        """Architecture name -> names and shapes of its tensors."""
        return {
            architecture: {name: value.shape for name, value in tensors.items()}
            for architecture, tensors in self.blueprint().items()
        }

    def share_weights(self) -> None:
        """Start ``weights`` from initial values: the server model's own, then those of each architecture.

        Raises:
            ConfigError: two architectures have tensors of one name but of different shape.
        """
        own = self.model.state_dict() if self.has_model else {}
        owner = dict.fromkeys(own, "the server")
        self.weights = {name: value.clone() for name, value in own.items()}
        for architecture, tensors in self.blueprint().items():
            for name, value in tensors.items():
                if self.weights.setdefault(name, value).shape != value.shape:
                    raise ConfigError(
                        f"averaging by name needs equal shapes: '{name}' is {list(self.weights[name].shape)} in "
                        f"{owner[name]} and {list(value.shape)} in {architecture}; give them equal encoders"
                    )
                owner.setdefault(name, architecture)

    def represent_public(self, *, training: bool = False) -> Representations:
        """Representations of the whole public set by the current model."""
        return Representations(self.represent(self.public_set, training=training), order=self.public_order)

    def weights_for(self, client: ClientInfo) -> Weights:
        """The aggregated tensors that a client's architecture has."""
        return Weights({name: self.weights[name] for name in self.architectures[client.architecture]})

    def update_weights(self, new: Mapping[str, Tensor]) -> None:
        """Replace aggregated tensors by name, and show them to the server's own model where it has them."""
        self.weights.update(new)
        if self.has_model:
            own = self.model.state_dict()
            self.model.load_state_dict({name: self.weights.get(name, value) for name, value in own.items()})

    def record(self, **metrics: float) -> None:
        """Add training metrics of this round."""
        if metrics:
            self.log("train", metrics=metrics)

    def log(self, kind: str, party: str = "server", **content: Any) -> None:
        """Add a record of this round."""
        self.records.append({"round": self.clock.round, "party": party, "kind": kind, **content})


def _section(groups: Mapping[str, Mapping[str, Tensor]], prefix: str) -> dict[str, dict[str, Tensor]]:
    return {name.removeprefix(prefix): dict(value) for name, value in groups.items() if name.startswith(prefix)}


def no_model(weights: Mapping[str, Tensor] | None) -> Model:
    """What a server without a model provides: an error that says so."""
    raise ConfigError("this method needs a server model; add a 'server' section")


def loaded(model: Model, weights: Mapping[str, Tensor] | None) -> Model:
    """The model, with the given weights or else with its own."""
    if weights is not None:
        model.load_state_dict(dict(weights))
    return model
