"""Classification of samples by one modality or several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Float, Int64
from pydantic import Field, SerializeAsAny, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError, DataError
from polyfed.core.settings import Settings, require_default
from polyfed.data.samples import Batch, Samples
from polyfed.losses.classification import class_separation, margin_cross_entropy
from polyfed.models.heads import LinearHead, NamesHead, NonNegativeHead, class_count
from polyfed.models.model import CachedModel, Embedder
from polyfed.tasks import evaluating
from polyfed.tasks.imputations import Embeddings, Imputation, Imputer, LeaveOut, embeddings_of
from polyfed.tasks.metrics import TaskScores, accuracies, items_beside, label_ranks, mean_by_item, predictions
from polyfed.tasks.task import AnySamples, Task

_IMPUTER = "imputer"


class ClassNames(Settings):
    """Texts that stand for classes, as CLIP classifies without training (Radford et al., ICML 2021, section 3.1)."""

    modality: str = Field(default="text", description="modality whose encoder reads the names; samples may lack it")
    template: str = Field(default="a photo of a {}", description="text with {} for a class; {} alone with prompts")
    temperature: float = Field(default=0.01, gt=0, le=10, description="temperature of the cosines; 0.01 is CLIP's")

    @field_validator("template")
    @classmethod
    def _has_a_place(cls, value: str) -> str:
        if "{}" not in value:
            raise ValueError(f"template '{value}' has no {{}} for the class's name")
        return value

    def __str__(self) -> str:
        """Part of a type's name that distinguishes classifiers by names."""
        return f"{self.modality}-{self.template}-{self.temperature}"

    def texts(self, names: Sequence[str]) -> list[str]:
        """Texts by class; an underscore in a name stands for a space."""
        return [self.template.replace("{}", name.replace("_", " ")) for name in names]


@dataclass(frozen=True)
class Classified:
    """Embeddings by which a batch is classified.

    Attributes:
        batch: the usable samples.
        parts: their embeddings by modality.
        fuse: joins the embeddings of each sample.
    """

    batch: Batch
    parts: Embeddings
    fuse: Callable[[Embeddings, int], Tensor]

    @cached_property
    def feature(self) -> Float[Tensor, "b d"]:
        """Joint embedding of each sample, with one draw of modality dropout."""
        return self.fuse(self.parts, len(self.batch))


class Classification(Task):
    """Predict a class from the embedding of one modality or the mean of several, missing ones by ``imputation``.

    Metrics in percent: ``accuracy`` (primary), ``top5`` (from 10 classes on), ``balanced_accuracy`` (mean
    recall of the classes that occur) and ``macro_f1``, each with ``<name>_of_constant``, the highest that one answer to
    all test samples reaches; further ``loss`` (cross-entropy without margin, mean over samples), ``n`` samples and
    ``classes``. Ties and NaN count against the model. Where test samples lack modalities,
    ``accuracy_given_<modality>...`` and ``n_given_<modality>...`` count samples that have just these; with
    ``given: each``, all samples that have a modality, given this alone.

    With ``names`` the model's embeddings of texts with the names of the classes are the classifier, so that an
    untrained pretrained model classifies too (the twin ``zero-shot``).

    The released CreamFL: ``margin: 4, separation: 0.5, non_negative: true, scale: 128, bias: true``.
    """

    shapes_head: ClassVar[tuple[str, ...] | None] = ("classes", "non_negative", "scale", "bias", "names", "imputation")

    target: str = Field(default="label", description="name of the target that holds the class")
    classes: int | None = Field(default=None, ge=1, description="number of classes; None: by names or highest label")
    modality: str | None = Field(default=None, description="modality to classify by; None: all that a sample has")
    margin: float = Field(default=0.0, ge=0, description="logit margin by which the true class must win (CreamFL: 4)")
    separation: float = Field(default=0.0, ge=0, description="weight of the class separation loss (CreamFL: 0.5)")
    non_negative: bool = Field(default=False, description="use the positive part of the classifier's weights")
    scale: float = Field(default=1.0, gt=0, description="factor on the embedding of a non-negative head (CreamFL: 128)")
    bias: bool = Field(default=True, description="classifier with a bias")
    imputation: SerializeAsAny[Imputation] = Field(default=LeaveOut(), description="replacement of missing modalities")
    given: Literal["all", "each"] = Field(default="all", description="evaluate by all modalities, also by each alone")
    names: ClassNames | None = Field(default=None, description="classify by names of classes; null: a learnt head")

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        if self.names is not None:
            require_default(self, "with names", "classes", "separation", "non_negative", "bias")
            if self.modality == self.names.modality:
                raise ValueError(f"modality is '{self.modality}', which reads names (names.modality); name another")
        if not self.non_negative:
            require_default(self, "with non_negative: false", "scale")
        if self.modality is not None:
            require_default(self, f"with modality: {self.modality}", "imputation", "given")
        return self

    @property
    def own_modalities(self) -> frozenset[str]:
        return frozenset() if self.names is None else frozenset({self.names.modality})

    @property
    def compared(self) -> frozenset[str]:
        return frozenset([self.modality] if self.modality else ())

    @property
    def is_per_sample(self) -> bool:
        # which sample loses a modality is drawn for the batch
        return not self.separation and not self.imputation.dropout

    @property
    def looks_in_public(self) -> bool:
        return self.imputation.looks_in_public

    @property
    def primary(self) -> str:
        """``accuracy``."""
        return "accuracy"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """See ``Task``."""
        shares = "accuracy", "top5", "balanced_accuracy", "macro_f1"
        return *shares, *(f"{name}_of_constant" for name in shares), "loss", "n", "classes", "items"

    def head(self, dim: int, samples: Samples) -> nn.Module:
        """The classifier.

        Raises:
            ConfigError: the samples have no such target or modality, or a label is out of range.
        """
        modalities, classes = self._modalities(samples.modalities), self._classes(samples)
        head: nn.Module
        if self.names is not None:
            if not (names := samples.classes.get(self.target)):
                raise ConfigError(
                    f"task.names: target '{self.target}' has no names of classes, only numbers; give the source's "
                    "column names of classes, or leave names out"
                )
            head = NamesHead(self.names.texts(names), self.names.modality, self.names.temperature)
        elif self.non_negative:
            head = NonNegativeHead(dim, classes, scale=self.scale, bias=self.bias)
        else:
            head = LinearHead(dim, classes, bias=self.bias)
        if len(modalities) > 1:
            head.add_module(_IMPUTER, self.imputation.imputer(dim, modalities))
        return head

    def prepare(self, model: Embedder, head: nn.Module | None, public: Samples | None, batch_size: int) -> None:
        """See ``Task``."""
        if (imputer := _imputer(head)) is not None:
            imputer.prepare(model, public, batch_size)

    def require_public(self, modalities: Collection[str]) -> None:
        """See ``Task``."""
        self.imputation.require_public(modalities)

    def usable(self, samples: AnySamples) -> AnySamples:
        """Samples with a modality that is classified by."""
        return samples.having_any(*[name for name in samples.inputs if self.modality in (None, name)])

    def loss(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Tensor:
        own = self.classified(model, head, batch)
        if not own.parts:
            return own.batch.no_loss
        loss = margin_cross_entropy(self._logits(model, head, own), own.batch.targets[self.target].long(), self.margin)
        if self.separation:
            loss = loss + self.separation * class_separation(self.require_head(head).get_parameter("weight"))
        return loss

    def evaluate(
        self, model: Embedder, head: nn.Module | None, samples: Samples, *, batch_size: int
    ) -> dict[str, float]:
        """Metrics of all samples.

        Raises:
            ConfigError: the samples have no such target or modality.
            DataError: the samples are empty, or a label is outside the head's classes.
        """
        head = self.require_head(head)
        labels, classes = self._labels(samples), class_count(head)
        outside = labels[(labels < 0) | (labels >= classes)]
        if len(outside):
            raise DataError(
                f"target '{self.target}' has label {int(outside[0])}, but the head has {classes} classes; set classes "
                "to the number over all splits"
            )
        samples = self.usable(samples.only(self._modalities(samples.modalities)))
        labels = labels if len(labels) == len(samples) else self._labels(samples)
        with evaluating(model, head):
            positions, predicted, losses = self._outcomes(model, head, samples, batch_size)
            metrics = accuracies(positions, predicted, labels, classes)
            metrics |= {"loss": float(losses.double().mean()), "n": float(len(labels)), "classes": float(classes)}
            alone = samples.modalities if self.given == "each" and len(samples.modalities) > 1 else ()
            given = {name: samples.only([name]).having(name) for name in alone}
            ranks = {name: self._outcomes(model, head, own, batch_size)[0] for name, own in given.items() if len(own)}
            ranks = ranks or {name: positions[chosen] for name, chosen in _patterns(samples).items()}
        for name, mine in ranks.items():
            metrics[f"accuracy_given_{name}"] = 100.0 * float((mine < 1).double().mean())
            metrics[f"n_given_{name}"] = float(len(mine))
        return TaskScores(
            metrics | items_beside(samples), {"accuracy": [mean_by_item(100.0 * (positions < 1), samples.items)]}
        )

    def _outcomes(
        self, model: Embedder, head: nn.Module, samples: Samples, batch_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rank of each sample's true class, the predicted one, and the loss."""
        results: list[tuple[Tensor, Tensor, Tensor]] = []
        classifier = _classifier(model, head)  # once for all batches
        for batch in (batch.to(model.device) for batch in samples.batches(batch_size)):
            logits = classifier(self.feature(model, head, batch)).float()
            truth = batch.targets[self.target].long()
            positions = label_ranks(logits, truth)
            losses = F.cross_entropy(logits, truth, reduction="none")  # without margin, whatever training has
            results.append((positions, predictions(logits, truth, positions), losses))
        # left on the device until here, so that no batch waits for a GPU
        positions, predicted, losses = (torch.cat(part).cpu() for part in zip(*results, strict=True))
        return positions, predicted, losses

    def feature(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Float[Tensor, "b d"]:
        """Joint embedding: that of the one modality, or the mean of those of several."""
        return self._embedded(model, head, batch).feature

    def classified(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Classified:
        """Embeddings of the usable samples of a batch, the same for all its losses."""

        def make() -> Classified:
            return self._embedded(model, head, self.usable(batch))

        return model.once(head, batch, make) if isinstance(model, CachedModel) else make()

    def _embedded(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Classified:
        imputer = _imputer(head)
        if not len(batch):
            return Classified(batch, {}, _mean)
        modalities = self._modalities(tuple(batch.inputs)) if imputer is None else imputer.modalities
        return Classified(batch, embeddings_of(model, batch, modalities), imputer or _mean)

    def scores(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Float[Tensor, "b c"]:
        """See ``Task``; only usable samples have scores."""
        return self._logits(model, head, self.classified(model, head, batch))

    def _logits(self, model: Embedder, head: nn.Module | None, own: Classified) -> Float[Tensor, "b c"]:
        logits: Tensor = _classifier(model, self.require_head(head))(own.feature)
        return logits

    def _modalities(self, available: tuple[str, ...]) -> tuple[str, ...]:
        return self.require_modalities(available if self.modality is None else [self.modality], available, "modality")

    def _labels(self, samples: Samples) -> Int64[Tensor, " n"]:
        if self.target not in samples.targets:
            raise ConfigError(
                f"classification target '{self.target}' is not among the samples' targets "
                f"{sorted(samples.targets)}; set target, or name its column under the source's targets"
            )
        if len(samples) == 0:
            raise DataError(f"no samples to classify by '{self.target}'; enlarge this participant's share of the data")
        return samples.targets[self.target].long()

    def _classes(self, samples: Samples) -> int:
        labels = self._labels(samples)
        names = samples.classes.get(self.target)
        # names count classes that a client's own samples may lack
        classes = self.classes or (len(names) if names else int(labels.max()) + 1)
        if int(labels.max()) >= classes or int(labels.min()) < 0:
            raise ConfigError(
                f"target '{self.target}' has labels from {int(labels.min())} to {int(labels.max())}, which "
                f"do not fit {classes} classes; raise classes, or number the labels from 0"
            )
        return classes


def _patterns(samples: Samples) -> dict[str, Int64[Tensor, " k"]]:
    """Names of modalities -> the samples that have just these; empty where no sample lacks one."""
    masks, patterns = torch.stack([samples.rows[name] >= 0 for name in samples.modalities]), {}
    for pattern in torch.unique(masks, dim=1).T if not bool(masks.all()) else ():
        names = "_".join(name for name, has in zip(samples.modalities, pattern.tolist(), strict=True) if has)
        patterns[names] = (masks == pattern[:, None]).all(0).nonzero()[:, 0]
    return patterns


def _mean(parts: Embeddings, count: int) -> Float[Tensor, "b d"]:
    first, *others = [part.values for part in parts.values()]
    # of embeddings, not of logits: one head serves any number of modalities
    return torch.stack([first, *others]).mean(0) if others else first


def _imputer(head: nn.Module | None) -> Imputer | None:
    """Module that fills in for modalities; a head of one modality has none."""
    imputer = None if head is None else head._modules.get(_IMPUTER)
    return imputer if isinstance(imputer, Imputer) else None


def _classifier(model: Embedder, head: nn.Module) -> nn.Module:
    return head.against(model.represent) if isinstance(head, NamesHead) else head
