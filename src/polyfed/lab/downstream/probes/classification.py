"""Classification by frozen encoders: logistic regression on small shares of the data, or prompts without training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple, Self

import pyarrow.compute as pc
import torch
from jaxtyping import Float, Int64
from pydantic import Field, field_validator, model_validator
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import ConfigError, DataError, nearest
from polyfed.core.extras import brought_by
from polyfed.data.source import text_column
from polyfed.lab.downstream.probe import (
    Bench,
    FeatureKind,
    FrozenModel,
    Outcome,
    Probe,
    ProbeRow,
    Share,
    absent_note,
    class_metrics,
    require_apart,
)

_STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
_NEVER = -100.0  # logarithm of the chance of what cannot be


class Labelled(NamedTuple):
    """Features of samples and their classes, on the CPU."""

    x: Float[Tensor, "n d"]
    y: Int64[Tensor, " n"]


class FewShot(Probe):
    """Linear probe on shares of the training data (FedAID, arXiv 2404.03854, appendix B.2).

    Features are computed once. For each share and draw, that share of every class (one sample at least) is drawn, and
    scikit-learn's logistic regression fitted to it, on features scaled by its mean and deviation. Its C is that of the
    lowest validation loss, of 0.001, 0.01, ..., 100; 1 without validation.

    Metrics on the test split, in percent: ``accuracy``, ``balanced_accuracy``, ``auroc`` (two classes: of the second;
    more: mean over classes against the rest). Beside them the numbers of samples, ``n`` being those trained on.
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
    features: Literal["auto", "trunk", "embedding"] = Field(
        default="auto",
        description="trunk: pooled vector before projection or align module; embedding: what the model embeds; auto: "
        "trunk where the encoder can be split",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require_apart(self.train, self.validation, [self.test], "name different splits, or validation: null")
        return self

    def unsuitable(self, bench: Bench) -> str | None:
        """The model does not encode the modality."""
        return bench.subject.lacks([self.modality])

    def check(self, bench: Bench, task: str) -> None:
        """Splits, columns, the target, and that there is more than one class to learn."""
        splits = [self.train, self.test, *([self.validation] if self.validation else [])]
        learnt: set[str] = set()
        for source in self._sources:
            bench.require(task, source, splits, [self.modality], self.target)
            split = bench.split(source, self.train)
            names = split.classes.get(self.target)
            numbers = pc.unique(split.read(split.targets[self.target]).flat_values()).to_pylist()
            learnt |= {names[number] if names else str(number) for number in numbers}
        bench.kind(self.features, self.modality, task)
        if len(learnt) < 2:
            raise DataError(
                f"tasks.{task}: '{'+'.join(self._sources)}' {self.train} has a single class of '{self.target}'; "
                "take another target, or data with at least two classes"
            )

    def run(self, bench: Bench, task: str) -> Outcome:
        kind = bench.kind(self.features, self.modality, task)
        names = list(dict.fromkeys(name for source in self._sources for name in self._names(bench, source, self.train)))
        train, test = self._data(bench, self.train, kind, names), self._data(bench, self.test, kind, names)
        validation = self._data(bench, self.validation, kind, names) if self.validation else None
        rows = []
        for share in self.shares:
            values: dict[str, list[float]] = {}
            for draw in range(bench.draws or self.draws):
                chosen = stratified(train.y, share, bench.stream(task, draw, f"share {share:g}"))
                scores = class_scores(Labelled(train.x[chosen], train.y[chosen]), validation, test.x, len(names))
                for name, value in class_metrics(scores, test.y).items():
                    values.setdefault(name, []).append(value)
            facts = {"n": len(chosen), "n_train": len(train.y), "n_test": len(test.y)}
            rows.append(ProbeRow(f"{100 * share:g} %", values, facts))
        notes = [f"Features: {kind}, width {train.x.shape[1]}. ± over draws.", *absent_note(test.y, names)]
        return Outcome(f"{'+'.join(self._sources)}.{self.target}", rows, notes)

    @property
    def _sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source

    def _names(self, bench: Bench, source: str, split: str) -> list[str]:
        """Names of a source's classes; where it has none, their numbers."""
        labels = bench.labels(source, split, self.modality, self.target)
        names = bench.split(source, split).classes.get(self.target)
        return list(names or map(str, range(int(labels.max()) + 1)))

    def _data(self, bench: Bench, split: str, kind: FeatureKind, names: list[str]) -> Labelled:
        """Features and classes of a split of all sources.

        Raises:
            DataError: it has a class that the training data do not know.
        """
        x = [bench.features(source, split, self.modality, kind) for source in self._sources]
        y = []
        for source in self._sources:
            labels = bench.labels(source, split, self.modality, self.target)
            own = self._names(bench, source, split)
            numbers = torch.tensor([names.index(name) if name in names else -1 for name in own])[labels]
            if bool((numbers < 0).any()):
                odd = int(labels[numbers < 0][0])
                raise DataError(
                    f"'{source}' {split} has class {odd} of '{self.target}', which {self.train} does not know"
                )
            y.append(numbers)
        return Labelled(torch.cat(x), torch.cat(y))


def stratified(labels: Int64[Tensor, " n"], share: float, generator: torch.Generator) -> Int64[Tensor, " k"]:
    """Positions of a random share of every class, ascending: round(share n_c) of each class, and at least one."""
    order = torch.randperm(len(labels), generator=generator)
    kept = []
    for label in labels.unique().tolist():  # type: ignore[no-untyped-call]
        own = order[labels[order] == label]  # the class in random order
        kept.append(own[: max(1, round(share * len(own)))])
    return torch.cat(kept).sort().values


def class_scores(
    few: Labelled, validation: Labelled | None, x: Float[Tensor, "n d"], classes: int
) -> Float[Tensor, "n c"]:
    """Logarithmic chances of every class by logistic regression on a few samples."""
    with brought_by("lab"):
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    def fitted(strength: float) -> Callable[[Tensor], Tensor]:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
        with warnings.catch_warnings():  # few samples are meant
            warnings.filterwarnings("ignore", "The number of unique classes")
            model.fit(few.x.double().numpy(), few.y.numpy())

        def scores(x: Tensor) -> Tensor:
            every = torch.full((len(x), classes), _NEVER, dtype=torch.float64)  # of classes that nobody had
            every[:, model.classes_] = torch.from_numpy(model.predict_log_proba(x.double().numpy())).clamp_min(_NEVER)
            return every

        return scores

    with threadpool_limits(1):  # sums do not depend on the number of threads
        if validation is None:
            return fitted(1.0)(x)
        losses = {scores: F.nll_loss(scores(validation.x), validation.y).item() for scores in map(fitted, _STRENGTHS)}
        return min(losses, key=lambda scores: losses[scores])(x)


class ZeroShot(Probe):
    """Classify by the cosine with prompts of each class (CLIP, Radford et al., ICML 2021, section 3.1).

    A class is represented by the mean of the unit vectors of its prompts (every template with every word), scaled to
    unit norm. Metrics as of ``few_shot``; a class's score in AUROC is its cosine less the mean of the others'.
    """

    short_name: ClassVar[str] = "zero_shot"

    source: str = Field(description="name of a source")
    target: str = Field(default="label", description="name of the target that holds the class")
    split: str = Field(default="test", description="split that metrics are of")
    modality: str = Field(default="image", description="modality that is classified")
    prompts: str = Field(default="text", description="modality of the prompts")
    templates: tuple[str, ...] = Field(default=("{}",), min_length=1, description="texts in which {} is the word")
    classes: dict[str, tuple[str, ...]] = Field(min_length=2, description="class name of the source -> its words")

    @field_validator("templates")
    @classmethod
    def _have_a_place(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for template in value:
            if "{}" not in template:
                raise ValueError(f"template '{template}' has no {{}} for the class's word")
        return value

    @field_validator("classes")
    @classmethod
    def _have_words(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for name, words in value.items():
            if not words or not all(word.strip() for word in words):
                raise ValueError(f"class '{name}' needs words, none of them empty, not {list(words)}")
        return value

    def unsuitable(self, bench: Bench) -> str | None:
        """The model does not encode both modalities."""
        return bench.subject.lacks([self.modality, self.prompts])

    def check(self, bench: Bench, task: str) -> None:
        bench.require(task, self.source, [self.split], [self.modality], self.target)
        names = self._names(bench)
        if not names:
            raise ConfigError(f"tasks.{task}: target '{self.target}' of '{self.source}' has no class names")
        for odd in set(names) ^ set(self.classes):
            where = "the source has no such class" if odd in self.classes else "a class of the source without words"
            raise ConfigError(f"tasks.{task}.classes: '{odd}': {where}; {nearest(odd, names)}")

    def run(self, bench: Bench, task: str) -> Outcome:
        names = self._names(bench)
        weights = torch.stack([self.class_vector(bench.subject, name) for name in names])
        x = F.normalize(bench.features(self.source, self.split, self.modality, "embedding"), dim=-1)
        labels = bench.labels(self.source, self.split, self.modality, self.target)
        cosines = x @ weights.T
        # a picture may be near all prompts; what tells classes apart is by how much more to one
        others = (cosines.sum(1, keepdim=True) - cosines) / (len(names) - 1)
        values = {name: [value] for name, value in class_metrics(cosines - others, labels).items()}
        prompts = sum(len(self.texts(name)) for name in names)
        row = ProbeRow(self.split, values, {"n_test": len(labels), "prompts": prompts})
        return Outcome(f"{self.source}.{self.target}", [row], absent_note(labels, names))

    def texts(self, name: str) -> list[str]:
        return [template.replace("{}", word) for template in self.templates for word in self.classes[name]]

    def _names(self, bench: Bench) -> tuple[str, ...]:
        return tuple(bench.split(self.source, self.split).classes.get(self.target, ()))

    @torch.no_grad()
    def class_vector(self, subject: FrozenModel, name: str) -> Float[Tensor, " d"]:
        texts = self.texts(name)
        column = text_column(texts, f"prompts of '{name}'")
        rows = subject.views[self.prompts].open(column, self.prompts, subject.context)
        units = subject.model.represent(self.prompts, rows(torch.arange(len(texts))).to(subject.device)).cpu()
        return F.normalize(units.mean(0), dim=-1)
