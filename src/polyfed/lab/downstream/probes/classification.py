"""Classification by frozen encoders: logistic regression on small shares of the data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Self

import pyarrow.compute as pc
import torch
from jaxtyping import Float, Int64
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import DataError
from polyfed.core.extras import brought_by
from polyfed.lab.downstream.probe import (
    Bench,
    FeatureKind,
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

    Features are computed once: the pooled vector before projection or align module where the encoder can be split, else
    what the model embeds. For each share and draw, that share of every class (one sample at least) is drawn, and
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
        if len(learnt) < 2:
            raise DataError(
                f"tasks.{task}: '{'+'.join(self._sources)}' {self.train} has a single class of '{self.target}'; "
                "take another target, or data with at least two classes"
            )

    def run(self, bench: Bench, task: str) -> Outcome:
        kind = bench.kind(self.modality)
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
