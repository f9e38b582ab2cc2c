"""Few-shot classification: a linear layer on a frozen encoder, trained on small shares of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import pyarrow.compute as pc
import torch
from jaxtyping import Int64
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.downstream.bench import Bench, Kind, Labelled
from polyfed.downstream.linear import Fit, fit_linear, standardised, stratified
from polyfed.downstream.probe import Probe
from polyfed.downstream.results import Outcome, Row
from polyfed.downstream.scores import absent_note, class_metrics
from polyfed.downstream.splits import Share, require_apart


class FewShot(Probe):
    """Linear probe on shares of the training data (FedAID, arXiv 2404.03854, appendix B.2).

    Features are computed once. For each share and draw, that share of every class (one sample at least) is drawn, and
    a linear layer trained on it by AdamW, until the validation loss has not fallen for ``patience`` epochs.

    Metrics on the test split, in percent: ``accuracy``, ``balanced_accuracy``, ``auroc`` (two classes: of the second;
    more: mean over classes against the rest). Beside them the numbers of samples, ``n`` being those trained on.
    """

    source: str | tuple[str, ...] = Field(
        min_length=1, description="name of a source, or of several, whose samples are joined and whose classes, by name"
    )
    target: str = Field(default="label", description="name of the target that holds the class")
    modality: str = Field(default="image", description="modality whose encoder is tested")
    train: str = Field(default="train", description="split that shares are drawn from")
    validation: str | None = Field(default="validation", description="split for early stopping; None: all epochs")
    test: str = Field(default="test", description="split that metrics are of")
    shares: tuple[Share, ...] = Field(default=(0.01, 0.1, 1.0), min_length=1, description="shares of the training data")
    draws: int = Field(default=5, ge=1, description="draws of each share, with seeds 42, 43, ...")
    features: Literal["auto", "trunk", "embedding"] = Field(
        default="auto",
        description="trunk: pooled vector before projection or align module; embedding: what the model embeds; auto: "
        "trunk where the encoder can be split",
    )
    standardise: bool = Field(
        default=False,
        description="features by mean and deviation of the samples trained on; the paper trains on them as they are",
    )
    lr: float = Field(default=5e-4, gt=0, description="of AdamW")
    weight_decay: float = Field(default=1e-6, ge=0, description="of AdamW")
    epochs: int = Field(default=50, ge=1, description="at most")
    patience: int = Field(default=10, ge=1, description="epochs without a lower validation loss")
    batch_size: int = Field(default=48, ge=1, description="samples a step")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require_apart(self.train, self.validation, [self.test], "name different splits, or validation: null")
        return self

    def unsuitable(self, bench: Bench) -> str | None:
        """The subject does not encode the modality."""
        return bench.subject.lacks([self.modality])

    def check(self, bench: Bench, task: str) -> None:
        """Splits, columns, the target, and that there is more than one class to learn.

        Raises:
            ConfigError, DataError: something of these is missing.
        """
        splits = [self.train, self.test, *([self.validation] if self.validation else [])]
        for source in self._sources:
            bench.require(task, source, splits, [self.modality])
            for name in splits:
                bench.require_target(task, source, name, self.target)
        bench.kind(self.features, self.modality, task)
        if len(self._learnt(bench)) < 2:
            raise DataError(
                f"tasks.{task}: '{self._on}' {self.train} has a single class of '{self.target}'; "
                "take another target, or data with at least two classes"
            )

    def run(self, bench: Bench, task: str) -> Outcome:
        """Train and test for every share and draw."""
        kind, names = bench.kind(self.features, self.modality, task), self._classes(bench)
        train, test = self._data(bench, self.train, kind, names), self._data(bench, self.test, kind, names)
        validation = self._data(bench, self.validation, kind, names) if self.validation else None
        rows = [self._row(bench, task, share, train, validation, test, len(names)) for share in self.shares]
        width = train.x.shape[1]
        notes = [f"Features: {kind}, width {width}. ± over draws.", *absent_note(test.y, names)]
        return Outcome(f"{self._on}.{self.target}", rows, notes)

    @property
    def _sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def _on(self) -> str:
        return "+".join(self._sources)

    def _learnt(self, bench: Bench) -> set[str]:
        """Names of the classes that occur in the training data."""
        found: set[str] = set()
        for source in self._sources:
            split = bench.split(source, self.train)
            names = split.classes.get(self.target)
            numbers = pc.unique(split.read(split.targets[self.target]).flat_values()).to_pylist()
            found |= {names[number] if names else str(number) for number in numbers}
        return found

    def _classes(self, bench: Bench) -> tuple[str, ...]:
        """Names of all classes: those of the sources in order; where a source has none, its numbers."""
        names: dict[str, None] = {}
        for source in self._sources:
            labels = bench.labels(source, self.train, self.modality, self.target)
            names |= dict.fromkeys(self._names(bench, source) or map(str, range(int(labels.max()) + 1)))
        return tuple(names)

    def _names(self, bench: Bench, source: str) -> tuple[str, ...]:
        return tuple(bench.split(source, self.train).classes.get(self.target, ()))

    def _data(self, bench: Bench, split: str, kind: Kind, names: Sequence[str]) -> Labelled:
        """Features and classes of a split of all sources.

        Raises:
            DataError: it has a class that the training data do not know.
        """
        x = [bench.features(source, split, self.modality, kind) for source in self._sources]
        return Labelled(torch.cat(x), torch.cat([self._numbers(bench, each, split, names) for each in self._sources]))

    def _numbers(self, bench: Bench, source: str, split: str, names: Sequence[str]) -> Int64[Tensor, " n"]:
        labels = bench.labels(source, split, self.modality, self.target)
        own = bench.split(source, split).classes.get(self.target) or map(str, range(int(labels.max()) + 1))
        place = [names.index(name) if name in names else -1 for name in own]
        found = torch.tensor(place)[labels]
        if bool((found < 0).any()):
            odd = int(labels[found < 0][0])
            raise DataError(f"'{source}' {split} has class {odd} of '{self.target}', which {self.train} does not know")
        return found

    def _row(
        self,
        bench: Bench,
        task: str,
        share: float,
        train: Labelled,
        validation: Labelled | None,
        test: Labelled,
        classes: int,
    ) -> Row:
        values: dict[str, list[float]] = {}
        used = 0
        for draw in range(bench.draws or self.draws):
            chosen = stratified(train.y, share, bench.stream(task, draw, f"share {share:g}"))
            few, used = Labelled(train.x[chosen], train.y[chosen]), len(chosen)
            for name, value in self._score(bench, task, draw, few, validation, test, classes).items():
                values.setdefault(name, []).append(value)
        facts = {"n": used, "n_train": len(train.y), "n_test": len(test.y)}
        return Row(f"{100 * share:g} %", values, facts)

    def _score(
        self,
        bench: Bench,
        task: str,
        draw: int,
        few: Labelled,
        validation: Labelled | None,
        test: Labelled,
        classes: int,
    ) -> dict[str, float]:
        """Metrics of one draw."""
        sets = [few, *([validation] if validation else []), test]
        x = standardised(*(each.x for each in sets)) if self.standardise else [each.x for each in sets]
        few, *middle, test = (Labelled(values, each.y) for values, each in zip(x, sets, strict=True))
        fit = Fit(self.lr, self.weight_decay, self.epochs, self.patience, self.batch_size)
        stream = bench.stream(task, draw, "order")
        layer = fit_linear(few, middle[0] if middle else None, classes, fit, stream)
        return class_metrics(layer(test.x).detach().softmax(1) if classes > 2 else layer(test.x).detach(), test.y)
