"""Where probes do their work: the subject, the data sets of a suite, and features that are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator
from polyfed.data.assembly import assemble
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.downstream.subject import Subject, computed
from polyfed.federation.settings import DataSettings

Kind = Literal["trunk", "embedding"]


class Labelled(NamedTuple):
    """Features of samples and their classes, on the CPU."""

    x: Float[Tensor, "n d"]
    y: Int64[Tensor, " n"]


@dataclass
class Bench:
    """A subject and the data that it is tested on.

    Attributes:
        subject: the model.
        data: sources of the suite, and those of the run.
        seed: what all draws derive from.
        draws: overrides the number of draws of all tasks.
    """

    subject: Subject
    data: DataSettings
    seed: int = 42
    draws: int | None = None
    _splits: dict[tuple[str, str], Split] = field(default_factory=dict)
    _samples: dict[tuple[str, ...], Samples] = field(default_factory=dict)
    _features: dict[tuple[str, str, str, str], Tensor] = field(default_factory=dict)

    def stream(self, task: str, draw: int, purpose: str) -> torch.Generator:
        """Randomness of a draw of a task: seed + draw, and what it is for."""
        return generator(self.seed + draw, "downstream", task, purpose)

    def split(self, source: str, name: str) -> Split:
        """A split of a source, opened once.

        Raises:
            ConfigError: no such source.
            DataError: no such split.
        """
        if source not in self.data.sources:
            raise ConfigError(f"no source '{source}' in the suite or the run; {nearest(source, self.data.sources)}")
        if (source, name) not in self._splits:
            opened = self.data.sources[source].open(name, name=source, data_dir=self.data.data_folder)
            self._splits[source, name] = opened
        return self._splits[source, name]

    def require(self, task: str, source: str, splits: Sequence[str], modalities: Sequence[str]) -> None:
        """Check that splits are there and have columns for the modalities.

        Raises:
            ConfigError: no such source, or it has no column for a modality.
            DataError: no such split.
        """
        for name in splits:
            split = self.split(source, name)
            for modality in modalities:
                if modality not in split.columns:
                    hint = nearest(modality, split.columns)
                    raise ConfigError(f"tasks.{task}: source '{source}' has no columns.{modality}; {hint}")

    def samples(self, source: str, split: str, modality: str) -> Samples:
        """All samples of a split in one modality, opened once."""
        return self.pairs(source, split, [modality])

    def pairs(self, source: str, split: str, modalities: Sequence[str]) -> Samples:
        """All samples of a split in several modalities, opened once."""
        key = (source, split, *modalities)
        if key not in self._samples:
            views = {name: self.subject.views[name] for name in modalities}
            self._samples[key] = assemble(self.split(source, split), views, self.subject.context)
        return self._samples[key]

    def kind(self, wanted: Literal["auto", "trunk", "embedding"], modality: str, task: str) -> Kind:
        """What of an encoder is looked at: auto is the trunk where there is one.

        Raises:
            ConfigError: a trunk is wanted, and the encoder cannot be split.
        """
        if wanted == "embedding":
            return "embedding"
        if self.subject.trunk(modality) is not None:
            return "trunk"
        if wanted == "trunk":
            encoder = type(self.subject.model.encoders[modality]).__name__
            raise ConfigError(
                f"tasks.{task}.features is 'trunk', but the encoder of '{modality}' ({encoder}) cannot be split; "
                "set it to embedding or auto"
            )
        return "embedding"

    def features(self, source: str, split: str, modality: str, kind: Kind) -> Float[Tensor, "n d"]:
        """Features of all samples of a split, computed once for all tasks."""
        key = (source, split, modality, kind)
        if key not in self._features:
            function = (self.subject.pooled if kind == "trunk" else self.subject.embed)(modality)
            assert function is not None
            where = f"'{source}' {split}"
            self._features[key] = computed(
                function, self.samples(source, split, modality), modality, self.subject, where
            )
        return self._features[key]

    def labels(self, source: str, split: str, modality: str, target: str) -> Int64[Tensor, " n"]:
        """Classes of all samples of a split."""
        return self.samples(source, split, modality).targets[target].long()

    def require_target(self, task: str, source: str, split: str, target: str) -> None:
        """Raise ConfigError if a split has no such target."""
        opened = self.split(source, split)
        if target not in opened.targets:
            hint = nearest(target, opened.targets)
            raise ConfigError(f"tasks.{task}.target: source '{source}' has no target '{target}'; {hint}")
