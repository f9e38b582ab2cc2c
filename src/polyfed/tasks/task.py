"""Tasks: a loss and its metrics together; and several tasks of one participant."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar, cast

from jaxtyping import Float
from pydantic import Field, SerializeAsAny, model_validator
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch, Samples
from polyfed.data.view import View
from polyfed.models.model import Embedder, Model
from polyfed.tasks.metrics import TaskScores

AnySamples = TypeVar("AnySamples", Samples, Batch)
_T = TypeVar("_T")


class Task(Settings):
    """Training goal of a participant's model. Subclasses live in ``polyfed.tasks``."""

    home: ClassVar[str] = "polyfed.tasks"
    shapes_head: ClassVar[tuple[str, ...] | None] = None
    """Settings in which two heads of this task may differ, in addition to classes (``target``); None: all settings."""

    @property
    def class_targets(self) -> tuple[str, ...]:
        """Targets that hold the task's classes."""
        target = getattr(self, "target", "")
        return (target,) if target else ()

    @property
    def own_modalities(self) -> frozenset[str]:
        """Modalities that the model encodes for the task itself, as names of classes: samples may lack them."""
        return frozenset()

    @property
    def compared(self) -> frozenset[str]:
        """Modalities of the samples that the task names; all others are optional."""
        return frozenset()

    @classmethod
    def shaping_settings(cls) -> tuple[str, ...]:
        """Settings in which two heads of this task may differ: such models are never averaged as a whole."""
        every = tuple(name for name in cls.model_fields if name != "target")
        return every if cls.shapes_head is None else cls.shapes_head

    @property
    def is_per_sample(self) -> bool:
        """True if the loss of a batch is the mean over samples of losses that depend on no other sample."""
        return False

    @property
    @abstractmethod
    def primary(self) -> str:
        """Name of the metric that selects models; higher is better."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """All names of metrics that ``evaluate`` may return; empty: unknown beforehand."""
        return ()

    @abstractmethod
    def head(self, dim: int, samples: Samples) -> nn.Module | None:
        """The task's own trainable module (classifier, learnable scale), or None; draws from the global generator.

        Raises:
            ConfigError: the samples lack labels or a modality that the task needs.
        """

    def require_modalities(self, wanted: Collection[str], samples: Collection[str], key: str) -> tuple[str, ...]:
        """The wanted modalities; raises ConfigError if there are none or the samples' modalities lack one."""
        if not wanted or not set(wanted) <= set(samples):
            raise ConfigError(
                f"task '{self.component_name()}' cannot use {[*wanted]} of samples with {[*samples]}; change {key}"
            )
        return tuple(wanted)

    def by_position(self, model: Embedder, method: str) -> Callable[[str, Tensor], Any]:
        """Method ``positions`` or ``detail`` of a model; raises ConfigError without it."""
        if (features := getattr(model, method, None)) is None:
            raise ConfigError(
                f"task '{self.component_name()}' needs features by position, which a method that trains through "
                f"{type(model).__name__} does not give; choose another method"
            )
        return cast("Callable[[str, Tensor], Any]", features)

    def require_head(self, head: nn.Module | None) -> nn.Module:
        """The head; raises TypeError without one."""
        if head is None:
            raise TypeError(f"{self.component_name()} needs the module that its head() made")
        return head

    @property
    def target_views(self) -> Mapping[str, View]:
        """Targets that are loaded with each batch, such as masks, and the view that opens each."""
        return {}

    @property
    def looks_in_public(self) -> bool:
        """True if ``prepare`` encodes public samples by the participant's own model."""
        return False

    def require_model(self, model: Model, samples: Samples) -> None:
        """Raise ConfigError if the task cannot be trained with this model on such samples; by default it can."""

    def require_public(self, modalities: Collection[str]) -> None:
        """Raise ConfigError if the task uses public samples and these ``modalities`` are not enough."""

    def usable(self, samples: AnySamples) -> AnySamples:
        """Samples of a set or batch that the task can use; by default all."""
        return samples

    def prepare(self, model: Embedder, head: nn.Module | None, public: Samples | None, batch_size: int) -> None:
        """Compute values that follow from a model's present weights, before training or evaluation; by default none.

        Raises:
            ConfigError: they need a public set, and there is none.
        """

    @abstractmethod
    def loss(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Tensor:
        """Scalar training loss of a batch (on the model's device)."""

    def scores(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Float[Tensor, "n c"]:
        """Scores of classes before a softmax: a row for each decision on a batch.

        Raises:
            ConfigError: the task has no classes.
        """
        raise ConfigError(f"task '{self.component_name()}' gives no scores of classes")

    @abstractmethod
    def evaluate(
        self, model: Embedder, head: nn.Module | None, samples: Samples, *, batch_size: int
    ) -> dict[str, float]:
        """Metrics on samples, in evaluation mode and view; the model's mode is restored.

        They include sizes that others depend on, such as ``gallery_images`` for a recall.
        """

    def judge(self, representations: Mapping[str, Tensor], samples: Samples) -> float | None:
        """The primary metric of representations [n, d] of samples by modality, of any origin.

        None: the task needs more than representations, such as a head.
        """
        return None


class Joint(Task):
    """Several tasks at once, each with a head of its own; written as a list in place of one task.

    Names of metrics begin with the task's, ``retrieval_r1_sum`` and ``classification_accuracy``; the first task's
    primary metric selects models. Tasks of one name are distinguished by their targets, or else numbered.
    """

    short_name: ClassVar[str] = "joint"

    tasks: tuple[SerializeAsAny[Task], ...] = Field(min_length=2, description="the tasks")
    weights: tuple[float, ...] | None = Field(default=None, description="factor of each task's loss; None: all 1")

    @model_validator(mode="after")
    def _plain_and_weighted(self) -> Self:
        if any(isinstance(task, Joint) for task in self.tasks):
            raise ValueError("tasks holds a joint task; list its tasks here")
        if self.weights is not None and (len(self.weights) != len(self.tasks) or min(self.weights) <= 0):
            raise ValueError(f"weights {list(self.weights)} must be {len(self.tasks)} numbers above 0, one a task")
        return self

    @cached_property
    def by_name(self) -> dict[str, Task]:
        """The tasks by the names that their heads and metrics carry."""
        shared = Counter(task.component_name() for task in self.tasks)
        names = [
            f"{name}-{target}" if shared[name] > 1 and target else name
            for name, target in ((task.component_name(), "-".join(task.class_targets)) for task in self.tasks)
        ]
        return {
            f"{name}-{names[:k].count(name) + 1}" if names.count(name) > 1 else name: task
            for k, (name, task) in enumerate(zip(names, self.tasks, strict=True))
        }

    @property
    def class_targets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(target for task in self.tasks for target in task.class_targets))

    @property
    def target_views(self) -> Mapping[str, View]:
        return {name: view for task in self.tasks for name, view in task.target_views.items()}

    @property
    def own_modalities(self) -> frozenset[str]:
        return frozenset.intersection(*(task.own_modalities for task in self.tasks))

    @property
    def compared(self) -> frozenset[str]:
        return frozenset[str]().union(*(task.compared for task in self.tasks))

    @property
    def is_per_sample(self) -> bool:
        return all(task.is_per_sample for task in self.tasks)

    @property
    def primary(self) -> str:
        name, first = next(iter(self.by_name.items()))
        return f"{name}_{first.primary}"

    @property
    def metric_names(self) -> tuple[str, ...]:
        known = {name: dict.fromkeys(task.metric_names) for name, task in self.by_name.items()}
        return tuple(_prefixed(known)) if all(known.values()) else ()

    def head(self, dim: int, samples: Samples) -> nn.Module | None:
        heads = {name: task.head(dim, samples) for name, task in self.by_name.items()}
        return nn.ModuleDict({name: head for name, head in heads.items() if head is not None})

    @property
    def looks_in_public(self) -> bool:
        return any(task.looks_in_public for task in self.tasks)

    def require_model(self, model: Model, samples: Samples) -> None:
        for task in self.tasks:
            task.require_model(model, samples)

    def require_public(self, modalities: Collection[str]) -> None:
        for task in self.tasks:
            task.require_public(modalities)

    def prepare(self, model: Embedder, head: nn.Module | None, public: Samples | None, batch_size: int) -> None:
        for name, task in self.by_name.items():
            task.prepare(model, _own(head, name), public, batch_size)

    def loss(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Tensor:
        """Weighted sum of the tasks' losses."""
        losses = [task.loss(model, _own(head, name), batch) for name, task in self.by_name.items()]
        weighted = [weight * loss for weight, loss in zip(self.weights or [1.0] * len(losses), losses, strict=True)]
        return sum(weighted[1:], weighted[0])

    def evaluate(
        self, model: Embedder, head: nn.Module | None, samples: Samples, *, batch_size: int
    ) -> dict[str, float]:
        metrics = {
            name: task.evaluate(model, _own(head, name), samples, batch_size=batch_size)
            for name, task in self.by_name.items()
        }
        by_item = {name: scores.by_item for name, scores in metrics.items() if isinstance(scores, TaskScores)}
        return TaskScores(_prefixed(metrics), _prefixed(by_item))

    def judge(self, representations: Mapping[str, Tensor], samples: Samples) -> float | None:
        return self.tasks[0].judge(representations, samples)


def _own(head: nn.Module | None, name: str) -> nn.Module | None:
    return head[name] if isinstance(head, nn.ModuleDict) and name in head else None


def _prefixed(by_task: Mapping[str, Mapping[str, _T]]) -> dict[str, _T]:
    return {f"{name}_{metric}": value for name, values in by_task.items() for metric, value in values.items()}
