"""Replacements for the embedding of a modality that a sample lacks, where embeddings of several are averaged."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch, Samples
from polyfed.models.model import Embedder
from polyfed.tasks import evaluating


@dataclass(frozen=True)
class PresentEmbeddings:
    """Embeddings of those samples of a batch that have a modality.

    Attributes:
        values: [k, d].
        index: position of each in the batch, ascending.
    """

    values: Float[Tensor, "k d"]
    index: Int64[Tensor, " k"]


Embeddings = Mapping[str, PresentEmbeddings]


class Imputation(Settings):
    """A way to fill in for missing modalities. Subclasses live in this module."""

    home: ClassVar[str] = "polyfed.tasks.imputations"
    looks_in_public: ClassVar[bool] = False
    """True if replacements are embeddings of public samples by the participant's own model."""

    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of samples with several modalities that lose one in training"
    )

    def require_public(self, modalities: Collection[str]) -> None:
        """Raise ConfigError if it uses public samples and these ``modalities`` are not enough."""

    def __str__(self) -> str:
        """Part of a type's name that distinguishes imputations: all settings that shape the average."""
        own = [f"{key}={getattr(self, key)}" for key in type(self).model_fields if key != "dropout"]
        return "-".join([self.component_name(), *own])

    @abstractmethod
    def imputer(self, dim: int, modalities: Sequence[str]) -> Imputer:
        """The module that fills in; its parameters are trained with the classifier, and averaged with it.

        Args:
            dim: width of embeddings.
            modalities: all that are averaged.
        """


class Imputer(nn.Module):
    """The mean over modalities of a sample's embeddings, with zeros in place of those that it lacks.

    Subclasses put something else there.

    Args:
        modalities: all that are averaged.
        dropout: see ``Imputation``.
    """

    def __init__(self, modalities: Sequence[str], dropout: float) -> None:
        super().__init__()
        self.modalities, self.dropout = tuple(modalities), dropout

    def forward(self, parts: Embeddings, count: int) -> Float[Tensor, "b d"]:
        """Joint embedding of each of ``count`` samples, which have at least one modality."""
        return self.fuse(self.thinned(parts, count) if self.training and self.dropout else parts, count)

    def fuse(self, parts: Embeddings, count: int) -> Float[Tensor, "b d"]:
        """The mean embedding of each sample, after modality dropout."""
        if [len(part.index) for part in parts.values()] == [count] * len(self.modalities):
            return torch.stack([parts[name].values for name in self.modalities]).mean(0)
        first = next(iter(parts.values())).values
        # encoders may end in different types under autocast, of which index_add takes one
        dtype = functools.reduce(torch.promote_types, (part.values.dtype for part in parts.values()))
        total = first.new_zeros(count, first.shape[1], dtype=dtype)
        for part in parts.values():
            total = total.index_add(0, part.index, part.values.to(dtype))
        for name in self.modalities:
            lacking = absent(parts, name, count, first.device)
            if len(lacking):
                total = total.index_add(0, lacking, self.fill(name, lacking, parts, count).to(dtype))
        return total / self.share(parts, count)

    def fill(self, modality: str, index: Int64[Tensor, " k"], parts: Embeddings, count: int) -> Float[Tensor, "k d"]:
        """Replacement for a modality that the samples at ``index`` lack, in a batch of ``count`` samples."""
        first = next(iter(parts.values())).values
        return first.new_zeros(len(index), first.shape[1])

    def share(self, parts: Embeddings, count: int) -> Float[Tensor, "b 1"] | int:
        """Divisor of the sum of embeddings."""
        return len(self.modalities)

    def prepare(self, model: Embedder, public: Samples | None, batch_size: int) -> None:
        """Compute values that follow from the model's present weights, before training or evaluation.

        Raises:
            ConfigError: they need a public set with all modalities, and there is none.
        """

    def thinned(self, parts: Embeddings, count: int) -> Embeddings:
        """The parts after modality dropout: some samples lose one modality of several, at random.

        Drawn from torch's global generator, as every dropout.
        """
        device = next(iter(parts.values())).index.device
        present = torch.zeros(len(self.modalities), count, dtype=torch.bool, device=device)
        for row, name in enumerate(self.modalities):
            if name in parts:
                present[row, parts[name].index] = True
        loses = (torch.rand(count, device=device) < self.dropout) & (present.sum(0) > 1)
        # the modality with the largest draw, of those that the sample has
        drawn = torch.rand(len(self.modalities), count, device=device).masked_fill(~present, -1)
        kept = present & ~(loses & (drawn == drawn.amax(0)))
        thin = {}
        for row, name in enumerate(self.modalities):
            if name in parts and bool((mask := kept[row, parts[name].index]).any()):
                thin[name] = PresentEmbeddings(parts[name].values[mask], parts[name].index[mask])
        return thin


def embeddings_of(model: Embedder, batch: Batch, modalities: Sequence[str]) -> dict[str, PresentEmbeddings]:
    """Embeddings of a batch by modality, of the samples that have it."""
    count, parts = len(batch), {}
    every = torch.arange(count, device=batch.index.device)
    for name in [one for one in modalities if one in batch.inputs]:
        index = every if name not in batch.present else batch.present[name].nonzero()[:, 0]
        x, there = batch.inputs[name], index.shape[0]
        if there:
            # the same object where no sample lacks it: models remember inputs that they have embedded
            parts[name] = PresentEmbeddings(model.embed(name, x if there == count else x[index]), index)
    return parts


def absent(parts: Embeddings, modality: str, count: int, device: torch.device) -> Int64[Tensor, " k"]:
    """Index of the samples that lack a modality."""
    lacking = torch.ones(count, dtype=torch.bool, device=device)
    if modality in parts:
        lacking[parts[modality].index] = False
    return lacking.nonzero()[:, 0]


def mean_of(made: Embeddings, parts: Embeddings, count: int) -> Float[Tensor, "b w"]:
    """Mean over the modalities in ``made`` of each of ``count`` samples; zero for samples without any."""
    like = next(iter((*made.values(), *parts.values()))).values
    total, times = like.new_zeros(count, like.shape[1]), like.new_zeros(count, 1)
    for part in made.values():
        total = total.index_add(0, part.index, part.values.to(total.dtype))
        times = times.index_add(0, part.index, torch.ones_like(part.values[:, :1]).to(times.dtype))
    return total / times.clamp(min=1)


class LeaveOut(Imputation):
    """No replacement: the mean is over the modalities that a sample has."""

    short_name: ClassVar[str] = "drop"

    def imputer(self, dim: int, modalities: Sequence[str]) -> Imputer:
        return _LeftOut(modalities, self.dropout)


class _LeftOut(Imputer):
    def share(self, parts: Embeddings, count: int) -> Float[Tensor, "b 1"]:
        times = torch.bincount(torch.cat([part.index for part in parts.values()]), minlength=count)
        return times[:, None].to(next(iter(parts.values())).values.dtype)


class Zero(Imputation):
    """Zeros, so that a sample with fewer modalities weighs less."""

    short_name: ClassVar[str] = "zero"

    def imputer(self, dim: int, modalities: Sequence[str]) -> Imputer:
        return Imputer(modalities, self.dropout)


class Placeholder(Imputation):
    """A learnt vector for each modality."""

    short_name: ClassVar[str] = "placeholder"

    def imputer(self, dim: int, modalities: Sequence[str]) -> Imputer:
        return _Placeholders(dim, modalities, self.dropout)


class _Placeholders(Imputer):
    def __init__(self, dim: int, modalities: Sequence[str], dropout: float) -> None:
        super().__init__(modalities, dropout)
        self.vectors = nn.ParameterDict({name: nn.Parameter(torch.zeros(dim)) for name in modalities})

    def fill(self, modality: str, index: Int64[Tensor, " k"], parts: Embeddings, count: int) -> Float[Tensor, "k d"]:
        vector: Tensor = self.vectors[modality]
        return vector.expand(len(index), -1)


class Neighbour(Imputation):
    """Embedding in the missing modality of the public sample nearest in the modalities that the sample has."""

    short_name: ClassVar[str] = "nearest"
    looks_in_public: ClassVar[bool] = True

    def require_public(self, modalities: Collection[str]) -> None:
        """See ``Imputation``."""
        if len(modalities) < 2:
            raise _no_public("of several modalities")

    def imputer(self, dim: int, modalities: Sequence[str]) -> Imputer:
        return _Nearest(modalities, self.dropout)


class _Nearest(Imputer):
    def __init__(self, modalities: Sequence[str], dropout: float) -> None:
        super().__init__(modalities, dropout)
        self._bank: dict[str, Tensor] = {}  # of the model as it was when the client's step began; no state

    def prepare(self, model: Embedder, public: Samples | None, batch_size: int) -> None:
        if public is None or not set(self.modalities) <= set(public.modalities):
            raise _no_public(f"with {list(self.modalities)}")
        with evaluating(model, inference=False):
            batches = [batch.to(model.device) for batch in public.only(self.modalities).batches(batch_size)]
            self._bank = {
                name: torch.cat([model.embed(name, batch.inputs[name]).float() for batch in batches])
                for name in self.modalities
            }

    def fill(self, modality: str, index: Int64[Tensor, " k"], parts: Embeddings, count: int) -> Float[Tensor, "k d"]:
        if not self._bank:
            raise ConfigError(
                "task.imputation nearest needs the public set by the client's own model, which a saved model lacks; "
                "choose another imputation"
            )
        near = {
            name: PresentEmbeddings(
                F.normalize(part.values.detach().float(), dim=-1) @ F.normalize(self._bank[name], dim=-1).T, part.index
            )
            for name, part in parts.items()
        }
        return self._bank[modality][mean_of(near, near, count)[index].argmax(1)]


def _no_public(which: str) -> ConfigError:
    remedy = "add a 'public' section of such a source, or choose another imputation"
    return ConfigError(f"task.imputation nearest takes a public set {which}; {remedy}")
