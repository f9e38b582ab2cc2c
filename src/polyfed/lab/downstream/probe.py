"""Downstream probes: a frozen model, data, features that are computed once, and the outcome of a probe."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.errors import ConfigError, DataError, nearest
from polyfed.core.extras import brought_by
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings
from polyfed.data.assembly import assemble
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.data.view import DataContext, View
from polyfed.federation.settings import DataSettings
from polyfed.models.model import Model
from polyfed.models.towers import LocalFeatures, Splittable
from polyfed.reporting.compare import Spread
from polyfed.reporting.tables import Cell, TextTable, count
from polyfed.tasks.metrics import balanced_accuracy, label_ranks, predictions, top


@dataclass(frozen=True)
class ProbeRow:
    """Metrics under one condition (a share of the data, a client).

    Attributes:
        on: The condition.
        values: Metric -> value of every draw.
        facts: Conditions as numbers, such as numbers of samples.
    """

    on: str
    values: Mapping[str, Sequence[float]]
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def spreads(self) -> dict[str, Spread]:
        return {name: Spread.of(list(values)) for name, values in self.values.items()}

    def to_json(self) -> dict[str, Any]:
        metrics = {
            name: {"mean": spread.mean, "std": spread.std, "values": list(self.values[name])}
            for name, spread in self.spreads.items()
        }
        return {"on": self.on, "facts": dict(self.facts), "metrics": metrics}


@dataclass(frozen=True)
class Outcome:
    """Outcome of a probe in one task.

    Attributes:
        data: Name of the data.
        rows: Conditions.
        notes: Sentences that a reader of the figures needs.
    """

    data: str
    rows: Sequence[ProbeRow]
    notes: Sequence[str] = ()

    def table(self, title: str) -> TextTable:
        """One row per condition."""
        metrics = dict.fromkeys(chain.from_iterable(row.values for row in self.rows))
        rows: list[dict[str, Cell]] = [
            {
                "": row.on,
                **{name.replace("_", " "): str(row.spreads[name]) if name in row.values else None for name in metrics},
                **{name.replace("_", " "): count(value) for name, value in row.facts.items()},
            }
            for row in self.rows
        ]
        return TextTable.of(title, rows, tuple(self.notes))


FeatureLevel = Literal["trunk", "embedding"]
ClientTests = Callable[[], Mapping[str, Samples]]


@dataclass(frozen=True)
class FrozenModel:
    """A model with frozen encoders, and access to the test data of its clients.

    Attributes:
        name: Name for titles and records.
        model: The model in evaluation mode, on its device, without gradients.
        views: Modality -> view of its encoder.
        context: Vocabularies and caches of the views.
        batch: Samples at a time without gradients.
        clients: Returns the test samples of every client in these views, by id; None without clients.
    """

    name: str
    model: Model
    views: Mapping[str, View]
    context: DataContext
    batch: int = 256
    clients: ClientTests | None = None
    _trunks: dict[str, nn.Module | None] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        # no dropout, fixed batch statistics, and no graph behind features
        self.model.requires_grad_(False).eval()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def lacks(self, modalities: Sequence[str]) -> str | None:
        """Why it cannot encode these modalities; None if it can."""
        missing = [name for name in modalities if name not in self.views]
        return f"{self.name} encodes {', '.join(self.views)}, not '{missing[0]}'" if missing else None

    def trunk(self, modality: str) -> nn.Module | None:
        """The encoder before its projection or align module, input -> ``LocalFeatures``; None if it cannot be split."""
        if modality not in self._trunks:
            encoder = self.model.encoders[modality]
            # of a copy, as a split consumes its encoder
            trunk = copy.deepcopy(encoder).split()[0].eval() if isinstance(encoder, Splittable) else None
            self._trunks[modality] = trunk
        return self._trunks[modality]

    def embed(self, modality: str) -> Callable[[Tensor], Tensor]:
        """Encoder input -> embedding [b, d]."""
        return lambda x: self.model.embed(modality, x)

    def pooled(self, modality: str) -> Callable[[Tensor], Tensor]:
        """Encoder input -> pooled vector [b, c] of the trunk, which must exist."""
        trunk = self.trunk(modality)
        assert trunk is not None

        def pool(x: Tensor) -> Tensor:
            local: LocalFeatures = trunk(x)
            return local.pooled

        return pool


@torch.no_grad()
def computed(
    function: Callable[[Tensor], Tensor], samples: Samples, modality: str, subject: FrozenModel, what: str
) -> Tensor:
    """``function`` of every distinct input of a modality, repeated as the samples repeat it; fp32, on the CPU.

    Raises:
        DataError: A value is not finite, or samples are missing.
    """
    if not len(samples):
        raise DataError(f"{what} has no samples")
    samples.require_all(modality, what)
    # siblings share an image: each is encoded once
    rows, inverse_index = torch.unique(samples.rows[modality], return_inverse=True)
    load = samples.inputs[modality]
    parts = [function(load(part).to(subject.device)).float().cpu() for part in torch.split(rows, subject.batch)]
    features = torch.cat(parts)
    if not bool(features.isfinite().all()):
        raise DataError(f"features of '{modality}' by {subject.name} on {what} hold NaN or infinity: it has diverged")
    return features[inverse_index]


@dataclass
class Bench:
    """A model and its test data.

    Attributes:
        subject: The model.
        data: Sources of the suite, and those of the run.
        seed: Seed of all draws.
        draws: Number of draws of all tasks; None as each task sets it.
    """

    subject: FrozenModel
    data: DataSettings
    seed: int = 42
    draws: int | None = None
    _splits: dict[tuple[str, str], Split] = field(default_factory=dict)
    _samples: dict[tuple[str, ...], Samples] = field(default_factory=dict)
    _features: dict[tuple[str, str, str, str], Tensor] = field(default_factory=dict)

    def stream(self, task: str, draw: int, purpose: str) -> torch.Generator:
        return generator(self.seed + draw, "downstream", task, purpose)

    def split(self, source: str, name: str) -> Split:
        """A split of a source, opened once.

        Raises:
            ConfigError: The source is unknown.
            DataError: The split is unknown.
        """
        if source not in self.data.sources:
            raise ConfigError(f"no source '{source}' in the suite or the run; {nearest(source, self.data.sources)}")
        if (source, name) not in self._splits:
            opened = self.data.sources[source].open(name, name=source, data_dir=self.data.data_folder)
            self._splits[source, name] = opened  # tasks of a suite share their data
        return self._splits[source, name]

    def require(
        self, task: str, source: str, splits: Sequence[str], modalities: Sequence[str], target: str | None = None
    ) -> None:
        """Check that splits exist, with columns for the modalities, and the target if one is named.

        Raises:
            ConfigError: The source is unknown, or lacks a column or the target.
            DataError: The split is unknown.
        """
        for split in [self.split(source, name) for name in splits]:
            for modality in modalities:
                if modality not in split.columns:
                    hint = nearest(modality, split.columns)
                    raise ConfigError(f"tasks.{task}: source '{source}' has no columns.{modality}; {hint}")
            if target is not None and target not in split.targets:
                hint = nearest(target, split.targets)
                raise ConfigError(f"tasks.{task}.target: source '{source}' has no target '{target}'; {hint}")

    def samples(
        self, source: str, split: str, *modalities: str, lazy: Mapping[str, View] = MappingProxyType({})
    ) -> Samples:
        key = (source, split, *modalities, str(lazy))
        if key not in self._samples:
            views = {name: self.subject.views[name] for name in modalities}
            self._samples[key] = assemble(self.split(source, split), views, self.subject.context, lazy=lazy)
        return self._samples[key]

    def level(self, modality: str) -> FeatureLevel:
        """Level of the features: the trunk where the encoder can be split."""
        return "embedding" if self.subject.trunk(modality) is None else "trunk"

    def features(self, source: str, split: str, modality: str, level: FeatureLevel) -> Float[Tensor, "n d"]:
        key = (source, split, modality, level)
        if key not in self._features:
            function = (self.subject.pooled if level == "trunk" else self.subject.embed)(modality)
            samples, what = self.samples(source, split, modality), f"'{source}' {split}"
            self._features[key] = computed(function, samples, modality, self.subject, what)
        return self._features[key]

    def labels(self, source: str, split: str, modality: str, target: str) -> Int64[Tensor, " n"]:
        return self.samples(source, split, modality).targets[target].long()


Share = Annotated[float, Field(gt=0, le=1)]
"""Share of the samples of a split."""


class Probe(Settings):
    """A test of a frozen encoder. Subclasses live in ``polyfed.lab.downstream.probes``, or are named by import path."""

    home: ClassVar[str] = "polyfed.lab.downstream.probes"

    @abstractmethod
    def unsuitable(self, bench: Bench) -> str | None:
        """Why the bench's model is unsuitable (a modality or clients are missing); None if it is suitable."""

    @abstractmethod
    def check(self, bench: Bench, task: str) -> None:
        """Check data and settings before any work starts.

        Raises:
            ConfigError, DataError: Data or settings are wrong.
        """

    @abstractmethod
    def run(self, bench: Bench, task: str) -> Outcome:
        """Run the test; every random draw derives from the bench's seed and the task's name."""


def require_apart(train: str, validation: str | float | None, test: Sequence[str], hint: str) -> None:
    """Check that no split is used twice.

    Args:
        train: Training split.
        validation: Validation split; a share of ``train`` or None does not count.
        test: Test splits.
        hint: Remedy for the error message.

    Raises:
        ValueError: A split is named twice.
    """
    named = [train, *test, *([validation] if isinstance(validation, str) else [])]
    if len(set(named)) < len(named):
        raise ValueError(f"train '{train}', validation '{validation}' and test {list(test)} overlap; {hint}")


def class_metrics(scores: Float[Tensor, "n c"], labels: Int64[Tensor, " n"]) -> dict[str, float]:
    """Accuracy, balanced accuracy and AUROC in percent; ties count against the model, in AUROC as a half."""
    ranks = label_ranks(scores, labels)  # ranked once for all metrics
    return {
        "accuracy": float(top(ranks, 1)),
        "balanced_accuracy": float(balanced_accuracy(predictions(scores, labels, ranks), labels, scores.shape[1])),
        "auroc": macro_auroc(scores, labels),
    }


def macro_auroc(scores: Float[Tensor, "n c"], labels: Int64[Tensor, " n"]) -> float:
    """AUROC of the difference of the scores for two classes; for more, the mean over classes against the others.

    Classes that do not occur are left out of the mean; NaN for a single class.
    """
    with brought_by("lab"):
        from sklearn.metrics import roc_auc_score

    classes = torch.unique(labels).tolist()
    if len(classes) < 2:
        return math.nan
    if scores.shape[1] == 2:
        return 100 * float(roc_auc_score(labels, scores[:, 1] - scores[:, 0]))
    return 100 * fmean(float(roc_auc_score(labels == label, scores[:, label])) for label in classes)


def absent_note(labels: Int64[Tensor, " n"], names: Sequence[str]) -> list[str]:
    counts = torch.bincount(labels, minlength=len(names)).tolist()
    absent = [name for name, number in zip(names, counts, strict=True) if not number]
    return [f"Not in the test data, so left out of AUROC: {', '.join(absent)}."] if absent else []
