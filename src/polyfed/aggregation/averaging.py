"""How trained weights become new global models: which types of clients average what with each other.

Every type of client (one architecture, task and classes: image-only, text-only, paired, ...) has a global model of its
own. Within a type updates are averaged by sample count; between types a rule says, slot by slot, which types' updates a
global model takes, and with which coefficient: W <- W + sum of coefficient x update.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field, SerializeAsAny
from torch import Tensor

from polyfed.aggregation.mean import GlobalModel, Update
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.models.model import ModelSettings
from polyfed.optim.servers import Models, Replace, ServerOptimizer


class Averaging(Settings):
    """Averages what clients have trained; subclasses say which types of clients average what with each other."""

    home: ClassVar[str] = "polyfed.aggregation.averagings"
    between_types: ClassVar[bool] = False
    """Whether types average layers with each other."""
    is_of_changes: ClassVar[bool] = False
    """Whether it averages changes B A of low-rank adapters, whose factors must then be of one model."""

    mean: Literal["exact", "sequential"] = Field(
        default="exact", description="weighted mean, or one client after the other into the running model, as released"
    )
    server_optimizer: SerializeAsAny[ServerOptimizer] = Field(
        default=Replace(),
        description="how the global models follow the averages: replace, momentum, adam, adagrad",
    )

    @abstractmethod
    def average(
        self,
        weights: Models,
        models: Mapping[str, GlobalModel],
        updates: Iterable[Update],
        asked: Mapping[str, float],
    ) -> dict[str, dict[str, Tensor]]:
        """The averages by type; a tensor that nobody has moved is the very one of before.

        Args:
            weights: type -> its global model at the start of the round.
            models: type -> what its global model consists of.
            updates: one by one; none is kept.
            asked: type -> samples of the clients that are asked.
        """

    def require_adapters(self, models: Sequence[tuple[str, ModelSettings]]) -> None:
        """Check that clients will have what is averaged, by their groups' settings of models; see ``require``.

        Raises:
            ConfigError: naming what is missing.
        """

    def require(self, models: Mapping[str, GlobalModel]) -> None:
        """Check that all that is averaged with each other are the same tensors, behind the same frozen values.

        Raises:
            ConfigError: naming the clients and slots that cannot be averaged; or nobody has a slot of that kind.
        """


def _whole(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape


def require_one_frozen(
    models: Mapping[str, GlobalModel], form: Callable[[str, tuple[int, ...]], tuple[int, ...]] = _whole
) -> None:
    """Check that tensors of one name and form stand behind the same frozen values in all types that have them.

    Args:
        models: type -> what its global model consists of.
        form: what of a tensor's shape must be equal for it to be averaged, by its name and shape; by default all.

    Raises:
        ConfigError: naming the clients.
    """
    first: dict[tuple[str, tuple[int, ...], str], tuple[str, GlobalModel]] = {}
    for model in models.values():
        for name, place in model.places.items():
            for modality, digest in place.frozen:
                key = name, form(name, model.shapes[name]), modality
                known, other = first.setdefault(key, (digest, model))
                if known != digest:
                    raise ConfigError(
                        f"'{name}' of clients {model.some_clients} cannot be averaged with that of clients "
                        f"{other.some_clients}: what is frozen in their '{modality}' encoders is not the same "
                        f"({digest} and {known}); give them one pretrained network, or choose fedavg, which averages "
                        "by type"
                    )
