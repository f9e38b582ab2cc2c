"""Tasks: a loss and its metrics together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import ClassVar, TypeVar

from jaxtyping import Float
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch, Samples
from polyfed.data.view import View
from polyfed.models.model import Embedder, Model

AnySamples = TypeVar("AnySamples", Samples, Batch)


class Task(Settings):
    """What a participant's model is trained for. Subclasses live in ``polyfed.tasks``."""

    home: ClassVar[str] = "polyfed.tasks"
    shapes_head: ClassVar[tuple[str, ...] | None] = None
    """Settings by which two heads of this task differ, besides their classes (``target``); None: all settings."""

    @property
    def class_targets(self) -> tuple[str, ...]:
        """Targets that hold the classes which the task tells apart."""
        target = getattr(self, "target", "")
        return (target,) if target else ()

    @property
    def own_modalities(self) -> frozenset[str]:
        """Modalities that the model encodes for the task itself, as names of classes: samples need not have them."""
        return frozenset()

    @property
    def compared(self) -> frozenset[str]:
        """Modalities of the samples that the task names; it works with what there is of all others."""
        return frozenset()

    @classmethod
    def shaping_settings(cls) -> tuple[str, ...]:
        """Settings by which two heads of this task differ: models that differ in one are never averaged whole."""
        every = tuple(name for name in cls.model_fields if name != "target")
        return every if cls.shapes_head is None else cls.shapes_head

    @property
    def is_per_sample(self) -> bool:
        """Whether the loss of a batch is the mean of losses of its samples, each of which depends on no other."""
        return False

    @property
    @abstractmethod
    def primary(self) -> str:
        """Name of the metric that selects models; higher is better."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """All names that ``evaluate`` may give; empty: they are not known beforehand."""
        return ()

    @abstractmethod
    def head(self, dim: int, samples: Samples) -> nn.Module | None:
        """The task's own trainable module (classifier, learnable scale), or None; draws from the global generator.

        Raises:
            ConfigError: the samples lack what the task needs (labels, a modality).
        """

    @property
    def target_views(self) -> Mapping[str, View]:
        """Targets that are loaded with each batch, such as masks, and the view that opens each."""
        return {}

    @property
    def looks_in_public(self) -> bool:
        """Whether ``prepare`` looks at public samples, as the participant's own model sees them."""
        return False

    def require_model(self, model: Model, samples: Samples) -> None:
        """Raise ConfigError if the task cannot be trained with this model on such samples; most can with any."""

    def require_public(self, modalities: Collection[str]) -> None:
        """Raise ConfigError if the task takes public samples and these, of such modalities, are not enough."""

    def usable(self, samples: AnySamples) -> AnySamples:
        """Those of some samples, or of a batch, that have what the task takes; most tasks take all."""
        return samples

    def prepare(self, model: Embedder, head: nn.Module | None, public: Samples | None, batch_size: int) -> None:
        """Compute what the task takes from a model's present weights, before training or evaluation; most take nothing.

        Raises:
            ConfigError: that takes a public set, and there is none.
        """

    @abstractmethod
    def loss(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Tensor:
        """Scalar training loss of a batch (on the model's device)."""

    def scores(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Float[Tensor, "n c"]:
        """What the task decides by, before a softmax: a row for each decision on a batch, of classes.

        Raises:
            ConfigError: it decides otherwise.
        """
        raise ConfigError(f"task '{self.component_name()}' gives no scores of classes")

    @abstractmethod
    def evaluate(
        self, model: Embedder, head: nn.Module | None, samples: Samples, *, batch_size: int
    ) -> dict[str, float]:
        """Metrics on samples, in evaluation mode and view; leaves the model in the mode it had.

        Includes what each figure depends on, such as ``gallery_images`` for a recall.
        """

    def judge(self, representations: Mapping[str, Tensor], samples: Samples) -> float | None:
        """The primary metric of representations [n, d] of samples by modality, whoever made them.

        None: the task needs more than representations, such as a head.
        """
        return None
