"""What stands for the embedding of a modality that a sample lacks, where embeddings of several are averaged."""

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

from polyfed.core.settings import Settings
from polyfed.data.samples import Batch, Samples
from polyfed.models.model import Embedder


@dataclass(frozen=True)
class PresentEmbeddings:
    """Embeddings of those samples of a batch that have a modality.

    Attributes:
        values: [k, d].
        places: place of each in the batch, ascending.
    """

    values: Float[Tensor, "k d"]
    places: Int64[Tensor, " k"]


Embeddings = Mapping[str, PresentEmbeddings]


class Imputation(Settings):
    """A way to fill in for what samples lack. Subclasses live in ``polyfed.tasks.imputations``."""

    home: ClassVar[str] = "polyfed.tasks.imputations"
    is_per_sample: ClassVar[bool] = True
    """Whether what stands for a sample's modality depends on no other private sample."""

    looks_in_public: ClassVar[bool] = False
    """Whether what stands for it is of public samples, as the participant's own model sees them."""

    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of samples with several modalities that lose one in training"
    )

    def require_public(self, modalities: Collection[str]) -> None:
        """Raise ConfigError if it takes public samples and these, of such modalities, are not enough."""

    def __str__(self) -> str:
        """What tells one from another in the name of a type: all that shapes what is averaged."""
        own = [f"{key}={getattr(self, key)}" for key in type(self).model_fields if key != "dropout"]
        return "-".join([self.component_name(), *own])

    @abstractmethod
    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        """The module that fills in; its parameters are trained with the classifier, and averaged with it.

        Args:
            dim: width of embeddings.
            modalities: all that are averaged.
            classes: number of classes that samples have.
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
        """What is classified of each of ``count`` samples, each of which has a modality at least."""
        return self.fuse(self.thinned(parts, count) if self.training and self.dropout else parts, count)

    def fuse(self, parts: Embeddings, count: int) -> Float[Tensor, "b d"]:
        """The mean embedding of each sample, after modality dropout."""
        if [len(part.places) for part in parts.values()] == [count] * len(self.modalities):
            return torch.stack([parts[name].values for name in self.modalities]).mean(0)
        first = next(iter(parts.values())).values
        # encoders may end in different types under autocast, of which index_add takes one
        kind = functools.reduce(torch.promote_types, (part.values.dtype for part in parts.values()))
        total = first.new_zeros(count, first.shape[1], dtype=kind)
        for part in parts.values():
            total = total.index_add(0, part.places, part.values.to(kind))
        for name in self.modalities:
            lacking = absent(parts, name, count, first.device)
            if len(lacking):
                total = total.index_add(0, lacking, self.fill(name, lacking, parts, count).to(kind))
        return total / self.share(parts, count)

    def fill(self, modality: str, places: Int64[Tensor, " k"], parts: Embeddings, count: int) -> Float[Tensor, "k d"]:
        """What stands for a modality that the samples at ``places`` lack, of the ``count`` samples of a batch."""
        first = next(iter(parts.values())).values
        return first.new_zeros(len(places), first.shape[1])

    def share(self, parts: Embeddings, count: int) -> Float[Tensor, "b 1"] | int:
        """What the sum of embeddings is divided by."""
        return len(self.modalities)

    @torch.no_grad()
    def observe(self, parts: Embeddings, labels: Int64[Tensor, " b"]) -> None:
        """See a batch of training; only some imputers learn from it."""

    def prepare(self, model: Embedder, public: Samples | None, batch_size: int) -> None:
        """Compute what the imputer takes from the model's present weights, before training or evaluation.

        Raises:
            ConfigError: it takes a public set with all modalities, and there is none.
        """

    def thinned(self, parts: Embeddings, count: int) -> Embeddings:
        """The parts after modality dropout: some samples lose one modality of several, at random.

        From torch's global generator, as every dropout.
        """
        device = next(iter(parts.values())).places.device
        there = torch.zeros(len(self.modalities), count, dtype=torch.bool, device=device)
        for row, name in enumerate(self.modalities):
            if name in parts:
                there[row, parts[name].places] = True
        loses = (torch.rand(count, device=device) < self.dropout) & (there.sum(0) > 1)
        # the modality with the largest draw, of those that the sample has
        drawn = torch.rand(len(self.modalities), count, device=device).masked_fill(~there, -1)
        kept = there & ~(loses & (drawn == drawn.amax(0)))
        thin = {}
        for row, name in enumerate(self.modalities):
            if name in parts and bool((mask := kept[row, parts[name].places]).any()):
                thin[name] = PresentEmbeddings(parts[name].values[mask], parts[name].places[mask])
        return thin


def embeddings_of(model: Embedder, batch: Batch, modalities: Sequence[str]) -> dict[str, PresentEmbeddings]:
    """Embeddings of a batch by modality, of the samples that have it."""
    every = torch.arange(len(batch), device=batch.index.device)
    parts = {}
    for name in (one for one in modalities if one in batch.inputs):
        places = every if name not in batch.present else batch.present[name].nonzero()[:, 0]
        x = batch.inputs[name]
        if len(places):
            # the very input where nobody lacks it: models remember what they have embedded
            parts[name] = PresentEmbeddings(model.embed(name, x if len(places) == len(batch) else x[places]), places)
    return parts


def absent(parts: Embeddings, modality: str, count: int, device: torch.device) -> Int64[Tensor, " k"]:
    """Places of the samples that lack a modality."""
    lacking = torch.ones(count, dtype=torch.bool, device=device)
    if modality in parts:
        lacking[parts[modality].places] = False
    return lacking.nonzero()[:, 0]


def of_both(one: PresentEmbeddings, other: PresentEmbeddings, count: int) -> tuple[Tensor, Tensor, Int64[Tensor, " k"]]:
    """Embeddings of those of ``count`` samples that have both modalities, and their places."""
    if len(one.places) == len(other.places) == count:
        return one.values, other.values, one.places
    shared = torch.isin(one.places, other.places)
    return one.values[shared], other.values[torch.isin(other.places, one.places)], one.places[shared]


def mean_of(made: Embeddings, parts: Embeddings, count: int) -> Float[Tensor, "b w"]:
    """Means of what was made for each of ``count`` samples, of the modalities that it has; zero where nothing was."""
    like = next(iter((*made.values(), *parts.values()))).values
    total, times = like.new_zeros(count, like.shape[1]), like.new_zeros(count, 1)
    for part in made.values():
        total = total.index_add(0, part.places, part.values.to(total.dtype))
        times = times.index_add(0, part.places, torch.ones_like(part.values[:, :1]).to(times.dtype))
    return total / times.clamp(min=1)
