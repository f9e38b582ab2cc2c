"""Downstream probes of frozen encoders: their data, features that are computed once, and outcomes.

Logistic regression on small shares of the data, and retrieval between two modalities.
"""

from __future__ import annotations

import copy
import math
import warnings
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import pyarrow.compute as pc
import torch
from jaxtyping import Float, Int64
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

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
from polyfed.models.towers import Splittable
from polyfed.reporting.compare import Spread
from polyfed.reporting.tables import Cell, TextTable, count
from polyfed.tasks.metrics import balanced_accuracy, label_ranks, predictions, ranks, recall_at, top

_STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
_NEVER = -100.0  # log-probability of impossible classes


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
        trunk: Any = self.trunk(modality)
        return lambda x: trunk(x).pooled


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
        if (key := (source, split, *modalities, str(lazy))) not in self._samples:
            views = {name: self.subject.views[name] for name in modalities}
            self._samples[key] = assemble(self.split(source, split), views, self.subject.context, lazy=lazy)
        return self._samples[key]

    def level(self, modality: str) -> FeatureLevel:
        """Level of the features: the trunk where the encoder can be split."""
        return "embedding" if self.subject.trunk(modality) is None else "trunk"

    def features(self, source: str, split: str, modality: str, level: FeatureLevel) -> Float[Tensor, "n d"]:
        if (key := (source, split, modality, level)) not in self._features:
            function = (self.subject.pooled if level == "trunk" else self.subject.embed)(modality)
            samples, what = self.samples(source, split, modality), f"'{source}' {split}"
            self._features[key] = computed(function, samples, modality, self.subject, what)
        return self._features[key]

    def labels(self, source: str, split: str, modality: str, target: str) -> Int64[Tensor, " n"]:
        return self.samples(source, split, modality).targets[target].long()


Share = Annotated[float, Field(gt=0, le=1)]
"""Share of the samples of a split."""


class Probe(Settings):
    """A test of a frozen encoder. Subclasses live in ``polyfed.lab.downstream.probe``, or are named by import path."""

    home: ClassVar[str] = "polyfed.lab.downstream.probe"

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


class Labelled(NamedTuple):
    """Features of samples and their classes, on the CPU."""

    x: Float[Tensor, "n d"]
    y: Int64[Tensor, " n"]


class FewShot(Probe):
    """Linear probe on shares of the training data (FedAID, arXiv 2404.03854, appendix B.2).

    Features are computed once: the pooled vector before projection or align module where the encoder can be split, else
    what the model embeds. For each share and draw, that share of every class (one sample at least) is drawn, and
    scikit-learn's logistic regression fitted to it, on features scaled by its mean and deviation. Its C is that of the
    lowest validation loss, of 0.001, 0.01, ..., 100; 1 without validation.

    Metrics on the test split, in percent: ``accuracy``, ``balanced_accuracy``, ``auroc`` (two classes: of the second;
    more: mean over classes against the others), with the numbers of samples, of which ``n`` are trained on.
    """

    short_name: ClassVar[str] = "few_shot"

    source: str | tuple[str, ...] = Field(
        min_length=1, description="name of a source, or of several, whose samples are joined and whose classes, by name"
    )
    target: str = Field(default="label", description="name of the target that holds the class")
    modality: str = Field(default="image", description="modality whose encoder is tested")
    train: str = Field(default="train", description="split that shares are drawn from")
    validation: str | None = Field(default="validation", description="split that C is chosen by; None: C is 1")
    test: str = Field(default="test", description="split that metrics are of")
    shares: tuple[Share, ...] = Field(default=(0.01, 0.1, 1.0), min_length=1, description="shares of the training data")
    draws: int = Field(default=5, ge=1, description="draws of each share, with seeds 42, 43, ...")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require_apart(self.train, self.validation, [self.test], "name different splits, or validation: null")
        return self

    def unsuitable(self, bench: Bench) -> str | None:
        """Reason: the model does not encode the modality."""
        return bench.subject.lacks([self.modality])

    def check(self, bench: Bench, task: str) -> None:
        """Check splits, columns, the target, and that there is more than one class to learn."""
        splits = [self.train, self.test, *([self.validation] if self.validation else [])]
        learnt: set[str] = set()
        for source in self._sources:
            bench.require(task, source, splits, [self.modality], self.target)
            split = bench.split(source, self.train)
            names = split.classes.get(self.target)
            numbers = pc.unique(split.read(split.targets[self.target]).flat_values()).to_pylist()
            learnt |= {names[number] if names else str(number) for number in numbers}
        if len(learnt) < 2:
            raise DataError(
                f"tasks.{task}: '{'+'.join(self._sources)}' {self.train} has a single class of '{self.target}'; "
                "use another target, or data with at least two classes"
            )

    def run(self, bench: Bench, task: str) -> Outcome:
        level = bench.level(self.modality)
        names = list(dict.fromkeys(name for source in self._sources for name in self._names(bench, source, self.train)))
        train, test = self._data(bench, self.train, level, names), self._data(bench, self.test, level, names)
        validation = self._data(bench, self.validation, level, names) if self.validation else None
        rows = []
        for share in self.shares:
            values: dict[str, list[float]] = defaultdict(list)
            for draw in range(bench.draws or self.draws):
                chosen = stratified(train.y, share, bench.stream(task, draw, f"share {share:g}"))
                scores = class_scores(Labelled(train.x[chosen], train.y[chosen]), validation, test.x, len(names))
                for name, value in class_metrics(scores, test.y).items():
                    values[name].append(value)
            facts = {"n": len(chosen), "n_train": len(train.y), "n_test": len(test.y)}
            rows.append(ProbeRow(f"{100 * share:g} %", values, facts))
        notes = [f"Features: {level}, width {train.x.shape[1]}. ± over draws.", *absent_note(test.y, names)]
        return Outcome(f"{'+'.join(self._sources)}.{self.target}", rows, notes)

    @property
    def _sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source

    def _names(self, bench: Bench, source: str, split: str) -> list[str]:
        """Names of a source's classes, or their numbers where it has no names."""
        labels = bench.labels(source, split, self.modality, self.target)
        return list(bench.split(source, split).classes.get(self.target) or map(str, range(int(labels.max()) + 1)))

    def _data(self, bench: Bench, split: str, level: FeatureLevel, names: list[str]) -> Labelled:
        """Features and classes of a split of all sources.

        Raises:
            DataError: A class does not occur in the training data.
        """
        x = [bench.features(source, split, self.modality, level) for source in self._sources]
        y = []
        for source in self._sources:
            labels = bench.labels(source, split, self.modality, self.target)
            own = self._names(bench, source, split)
            numbers = torch.tensor([names.index(name) if name in names else -1 for name in own])[labels]
            if bool((numbers < 0).any()):
                odd = int(labels[numbers < 0][0])
                raise DataError(f"'{source}' {split} has class {odd} of '{self.target}', which {self.train} lacks")
            y.append(numbers)
        return Labelled(torch.cat(x), torch.cat(y))


def stratified(labels: Int64[Tensor, " n"], share: float, generator: torch.Generator) -> Int64[Tensor, " k"]:
    """Positions of a random share of every class, ascending: round(share n_c) of each class, and at least one."""
    order = torch.randperm(len(labels), generator=generator)
    kept = []
    for label in torch.unique(labels).tolist():
        own = order[labels[order] == label]  # the class in random order
        kept.append(own[: max(1, round(share * len(own)))])
    return torch.cat(kept).sort().values


def class_scores(few: Labelled, tuning: Labelled | None, x: Float[Tensor, "n d"], classes: int) -> Float[Tensor, "n c"]:
    """Log-probabilities of every class by logistic regression on a few samples."""
    with brought_by("lab"):
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
        from threadpoolctl import threadpool_limits

    def fitted(strength: float) -> Callable[[Tensor], Tensor]:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
        with warnings.catch_warnings():  # few samples are intended
            warnings.filterwarnings("ignore", "The number of unique classes")
            model.fit(few.x.double().numpy(), few.y.numpy())

        def scores(x: Tensor) -> Tensor:
            every = torch.full((len(x), classes), _NEVER, dtype=torch.float64)  # of classes without a training sample
            every[:, model.classes_] = torch.from_numpy(model.predict_log_proba(x.double().numpy())).clamp_min(_NEVER)
            return every

        return scores

    with threadpool_limits(1):  # sums do not depend on the number of threads
        if tuning is None:
            return fitted(1.0)(x)
        losses = {scores: F.nll_loss(scores(tuning.x), tuning.y).item() for scores in map(fitted, _STRENGTHS)}
        return min(losses, key=lambda scores: losses[scores])(x)


# ---- retrieval

Recalls = dict[str, dict[int, float]]
"""``forward`` (first modality -> second) or ``backward`` -> cutoff -> percent."""


class Gallery(NamedTuple):
    """Representations in one modality, unit norm, and the number in ``Samples.matches`` of each."""

    values: Float[Tensor, "n d"]
    matches: Int64[Tensor, " n"]

    def at(self, index: Int64[Tensor, " k"]) -> Gallery:
        return Gallery(self.values[index], self.matches[index])


def random_blocks(count: int, size: int, generator: torch.Generator) -> list[Int64[Tensor, " k"]]:
    """A random division into galleries of ``size``; a smaller last one is kept if it has at least two samples.

    A single sample is not a gallery: it would always be retrieved.
    """
    return [part for part in torch.split(torch.randperm(count, generator=generator), size) if len(part) > 1]


def recalls_between(galleries: Sequence[tuple[Gallery, Gallery]], cutoffs: Sequence[int]) -> Recalls:
    """Recalls in percent, both ways, over all samples of all galleries.

    A sample is compared with those of its own gallery only; each with its number in ``matches`` is a right answer.
    """
    forward = [ranks(a.values, b.values, a.matches, b.matches) for a, b in galleries]
    backward = [ranks(b.values, a.values, b.matches, a.matches) for a, b in galleries]
    return {"forward": recall_at(torch.cat(forward), cutoffs), "backward": recall_at(torch.cat(backward), cutoffs)}


class RetrievalProbe(Probe):
    """Recalls on every client's own test samples, or on a data set (FedAID, arXiv 2404.03854, appendix B.2).

    Both ways, at small cutoffs, in batches as in the paper: samples are shuffled and divided into galleries of
    ``batch``; each is searched within its own gallery, so the figure depends on the size, which is reported
    (``polyfed evaluate`` searches among all). Samples with equal ``Samples.matches`` are right answers. Ties count
    against the model.

    Without a ``source`` every client's own test samples are searched, with the mean over clients, the worst client and
    the disparity (best less worst). Clients whose every search would succeed, as they have a single sample, are left
    out and named in the notes.
    """

    short_name: ClassVar[str] = "retrieval"

    source: str | None = Field(default=None, description="name of a source; None: the clients' own test samples")
    split: str = Field(default="test", description="split of the source")
    between: tuple[str, str] = Field(default=("image", "text"), description="the two modalities")
    batch: int = Field(default=64, ge=2, description="size of an in-batch gallery")
    cutoffs: tuple[int, ...] = Field(default=(1, 5, 10), min_length=1, description="K of R@K")
    draws: int = Field(default=5, ge=1, description="shuffles into in-batch galleries")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.between[0] == self.between[1]:
            raise ValueError(f"between names '{self.between[0]}' twice; name two modalities")
        if min(self.cutoffs) < 1 or len(set(self.cutoffs)) < len(self.cutoffs):
            raise ValueError(f"cutoffs {list(self.cutoffs)} must be different numbers of at least 1")
        return self

    def unsuitable(self, bench: Bench) -> str | None:
        """Reason: the model does not encode both modalities, or clients to search are missing."""
        if self.source is None and bench.subject.clients is None:
            return f"{bench.subject.name} has no clients; give a run, or a source to search"
        return bench.subject.lacks(self.between)

    def check(self, bench: Bench, task: str) -> None:
        """Check split and columns, or that a client has both modalities; and that a search can fail."""
        if self.source is not None:
            bench.require(task, self.source, [self.split], self.between)
        if not self.searched(bench):  # of a source this raises
            both = " and ".join(self.between)
            raise DataError(f"tasks.{task}: no client has two test samples with {both} that do not answer each other")

    def searched(self, bench: Bench) -> Mapping[str, Samples]:
        """Samples to search: the split of the source, or clients' test samples.

        Raises:
            DataError: No search of the source can fail.
        """
        if self.source is not None:
            samples = bench.samples(self.source, self.split, *self.between)
            if not can_fail(samples):
                raise DataError(
                    f"'{self.source}' {self.split} has {len(samples)} sample(s) and no two that do not answer each "
                    "other, so that every search would succeed; use a split with more"
                )
            return {self.split: samples}
        return {name: tests for name, tests in self._paired(bench).items() if can_fail(tests)}

    def run(self, bench: Bench, task: str) -> Outcome:
        rows = [self._row(bench, task, name, samples) for name, samples in self.searched(bench).items()]
        notes = [
            f"In batches of {self.batch}; gallery: samples of a full batch, and of the smaller last one if it has two "
            "or more. ± over shuffles."
        ]
        if self.source is not None:
            return Outcome(self.source, rows, notes)
        names = [name for name, tests in self._paired(bench).items() if not can_fail(tests)]
        reason = "with a single test sample, or none that do not answer each other"
        left_out = [f"Left out, {reason}: {', '.join(names)}."] if names else []
        return Outcome("clients' own test samples", [*rows, *_over_clients(rows)], [*notes, *left_out])

    def _paired(self, bench: Bench) -> dict[str, Samples]:
        every = bench.subject.clients() if bench.subject.clients is not None else {}
        return {name: tests for name, tests in every.items() if set(self.between) <= set(tests.inputs) and len(tests)}

    def _row(self, bench: Bench, task: str, on: str, samples: Samples) -> ProbeRow:
        subject = bench.subject
        vectors = (computed(subject.embed(name), samples, name, subject, f"'{on}'") for name in self.between)
        first, second = (Gallery(F.normalize(one, dim=-1), samples.matches) for one in vectors)
        values: dict[str, list[float]] = defaultdict(list)
        for draw in range(bench.draws or self.draws):
            blocks = random_blocks(len(samples), self.batch, bench.stream(task, draw, f"galleries {on}"))
            recalls = recalls_between([(first.at(index), second.at(index)) for index in blocks], self.cutoffs)
            for way, (a, b) in {"forward": self.between, "backward": self.between[::-1]}.items():
                for k, value in recalls[way].items():
                    values[f"{a}_to_{b}_r@{k}"].append(value)
        sizes = [len(index) for index in blocks]
        facts = {"n": len(samples), "batches": len(blocks), "gallery": max(sizes), "last_gallery": min(sizes)}
        return ProbeRow(on, values, facts)


def can_fail(samples: Samples) -> bool:
    """True if a search among samples can fail: at least two, not all right answers to each other."""
    return len(torch.unique(samples.matches)) > 1


def _over_clients(rows: Sequence[ProbeRow]) -> list[ProbeRow]:
    """Mean over clients, worst client and disparity of every metric, draw by draw."""
    summaries: dict[str, Callable[[Sequence[float]], float]] = {
        "mean over clients": fmean,
        "worst client": min,
        "disparity": lambda values: max(values) - min(values),
    }
    by_metric = {metric: list(zip(*(row.values[metric] for row in rows), strict=True)) for metric in rows[0].values}
    return [
        ProbeRow(on, {metric: list(map(summary, draws)) for metric, draws in by_metric.items()}, {"clients": len(rows)})
        for on, summary in summaries.items()
    ]
