"""Averagings: from trained weights to new global models, within and between types of clients.

Every type of client (one architecture, task and classes: image-only, text-only, paired, ...) has a global model of its
own. Within a type updates are averaged by sample count; between types a rule gives, slot by slot, the types whose
updates a global model takes, each with its coefficient: W <- W + sum of coefficient x update.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field, SerializeAsAny
from torch import Tensor

from polyfed.aggregation.mean import WeightedMean
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.models.model import ModelSettings
from polyfed.models.slots import Slot, TensorSlots
from polyfed.optim.servers import Replace, ServerOptimizer


@dataclass(frozen=True)
class GlobalModel:
    """Global model of a type of clients, as aggregation sees it.

    Attributes:
        weights: the model at the start of the round, tensors by name.
        slots: slots of its tensors.
        modalities: modalities of the type's clients.
        clients: ids of the type's clients, for error messages.
    """

    weights: Mapping[str, Tensor]
    slots: TensorSlots
    modalities: tuple[str, ...]
    clients: tuple[str, ...] = ()

    @property
    def some_clients(self) -> str:
        """Ids of a few of the type's clients."""
        return ", ".join(self.clients[:3]) + (f" and {len(self.clients) - 3} more" if len(self.clients) > 3 else "")

    @cached_property
    def keys(self) -> Mapping[Slot, Mapping[str, str]]:
        """Slot -> key -> name of the tensor."""
        keys: dict[Slot, dict[str, str]] = {}
        for name, place in self.slots.items():
            keys.setdefault(place.slot, {})[place.key] = name
        return keys


ModelsByType = Mapping[str, GlobalModel]
"""Type of clients -> its global model."""


class Mean(Protocol):
    """Mean of the trained weights of a type's clients, folded one client at a time."""

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Fold the next client in; its tensors are not kept.

        Args:
            tensors: trained weights by name.
            weight: number of samples that they were trained on.
        """


Averages = dict[str, dict[str, Tensor]]
"""Type -> its new global model; unchanged tensors are the same objects as before."""


class Averaging(Settings):
    """Averages trained weights of clients; subclasses define what types average with each other."""

    home: ClassVar[str] = "polyfed.aggregation.averagings"
    between_types: ClassVar[bool] = False
    """True if types average layers with each other."""
    crosses_types: ClassVar[bool] = False
    """True if it takes one mean over the clients of all types, in place of the mean of each."""
    is_of_changes: ClassVar[bool] = False
    """True if it averages changes B A of low-rank adapters, whose factors must then be of one model."""

    mean: Literal["exact", "sequential"] = Field(default="exact", description="weighted mean, or client by client")
    server_optimizer: SerializeAsAny[ServerOptimizer] = Field(default=Replace(), description="follows the averages")

    def new_means(self, models: ModelsByType, asked: Mapping[str, float]) -> Mapping[str, Mean]:
        """Empty mean of each type, of the form that ``average`` takes.

        Args:
            models: global models as they are sent to clients.
            asked: type -> samples of the clients that are asked.
        """
        return {name: WeightedMean() for name in models}

    @abstractmethod
    def average(self, models: ModelsByType, means: Mapping[str, Any]) -> Averages:
        """New global models from the ``new_means`` of these models, which are used up."""

    def require_adapters(self, models: Sequence[tuple[str, ModelSettings]]) -> None:
        """Check that clients will have what is averaged, by their groups' settings of models; see ``require``.

        Raises:
            ConfigError: naming what is missing.
        """

    def require(self, models: ModelsByType) -> None:
        """Check that all that is averaged with each other are the same tensors, behind the same frozen values.

        Raises:
            ConfigError: naming the clients and slots that cannot be averaged; or no model has a slot of that role.
        """


def name_and_shape(name: str, value: Tensor) -> str:
    """Key that is equal for tensors that are averaged over all types."""
    return f"{name} {tuple(value.shape)}"


class SharedMean(WeightedMean):
    """Weighted means over the clients of all types that have a tensor of that name and shape."""

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        super().add({name_and_shape(name, value): value for name, value in tensors.items()}, weight)

    def averages(self, models: ModelsByType) -> Averages:
        """Weights of the models with the means in place of their tensors, where there are any; empties the mean."""
        means = self.take() if self.total else {}
        return {
            type_name: {name: means.get(name_and_shape(name, value), value) for name, value in model.weights.items()}
            for type_name, model in models.items()
        }


def require_one_frozen(
    models: ModelsByType, form: Callable[[str, tuple[int, ...]], tuple[int, ...]] = lambda name, shape: shape
) -> None:
    """Check that tensors of one name and form stand behind the same frozen values in all types that have them.

    Args:
        models: type -> its global model.
        form: part of a tensor's shape that must be equal, by its name and shape; by default all of it.

    Raises:
        ConfigError: naming the clients.
    """
    first: dict[tuple[str, tuple[int, ...], str], tuple[str, GlobalModel]] = {}
    for model in models.values():
        for name, place in model.slots.items():
            for modality, digest in place.frozen:
                key = name, form(name, tuple(model.weights[name].shape)), modality
                known, other = first.setdefault(key, (digest, model))
                if known != digest:
                    raise ConfigError(
                        f"'{name}' of clients {model.some_clients} cannot be averaged with that of clients "
                        f"{other.some_clients}: what is frozen in their '{modality}' encoders is not the same "
                        f"({digest} and {known}); give them one pretrained network, or choose fedavg, which averages "
                        "by type"
                    )
