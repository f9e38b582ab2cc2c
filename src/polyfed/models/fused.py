"""A model whose embeddings are fused with other encoders' features of the same samples; tasks take it as a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch, Samples
from polyfed.models.fusion import GranularityFusion, match_positions
from polyfed.models.model import Model
from polyfed.models.towers import Positions, positioned


class SampleFeatures(NamedTuple):
    """Features of samples: vectors [b, d], or features by position [b, l, d] and which are valid."""

    values: Float[Tensor, "b *l d"]
    mask: Bool[Tensor, "b l"] | None = None

    def at(self, index: Int64[Tensor, " k"]) -> SampleFeatures:
        """Of the samples at ``index``."""
        return SampleFeatures(self.values[index], None if self.mask is None else self.mask[index])

    def unit(self) -> SampleFeatures:
        return self._replace(values=F.normalize(self.values.float(), dim=-1))


def features_of(model: Model, modality: str, x: Tensor, *, maps: bool) -> SampleFeatures:
    """Features of a batch by a model's encoder, before normalisation.

    Raises:
        ConfigError: features by position are wanted of an encoder that has none.
    """
    if not maps:
        return SampleFeatures(model.embed(modality, x))
    encoder = model.encoders[modality]
    if not positioned(encoder):
        raise ConfigError(
            f"algorithm.fusion is maps, but the encoder of '{modality}' ({type(encoder).__name__}) gives no features "
            "by position; choose another encoder, or fusion: vectors"
        )
    # not through embed: its mean over positions comes after the fusion
    values, mask = encoder.positions(x)
    return SampleFeatures(values if model.final_norm is None else model.final_norm(values), mask)


@dataclass
class FusionGuidance:
    """Features of a client's samples by the server's frozen encoders, in the evaluation view, row by row of a modality.

    Attributes:
        model: the encoders, frozen.
        samples: the client's samples in their views.
        maps: features by position instead of vectors.
        batch: rows at a time.
        tables: modality -> features of its distinct rows, ascending, once they are known.
    """

    model: Model
    samples: Samples
    maps: bool
    batch: int
    tables: dict[str, SampleFeatures]
    _rows: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    _inverse_index: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    @torch.no_grad()
    def compute(self) -> None:
        for modality in self.samples.modalities:
            parts = [self.encoded(modality, rows) for rows in torch.split(self._distinct(modality), self.batch)]
            masks = [part.mask for part in parts if part.mask is not None]
            values = torch.cat([part.values for part in parts])
            self.tables[modality] = SampleFeatures(values, torch.cat(masks) if masks else None)

    def of_samples(self, modality: str, index: Int64[Tensor, " b"]) -> SampleFeatures:
        """Features of the samples at ``index``; encoded now if they are not known."""
        table = self.tables.get(modality)
        if table is None:
            return self.encoded(modality, self.samples.rows[modality][index.cpu()])
        if modality not in self._inverse_index:  # where the table is, so that a step need not wait for a GPU
            inverse_index = torch.searchsorted(self._distinct(modality), self.samples.rows[modality])
            self._inverse_index[modality] = inverse_index.to(table.values.device)
        return table.at(self._inverse_index[modality][index.to(table.values.device)])

    def of_rows(self, modality: str, rows: Int64[Tensor, " b"]) -> SampleFeatures:
        table = self.tables.get(modality)
        if table is None:
            return self.encoded(modality, rows)
        index = torch.searchsorted(self._distinct(modality), rows.cpu())
        return table.at(index.to(table.values.device))

    @torch.no_grad()
    def encoded(self, modality: str, rows: Int64[Tensor, " b"]) -> SampleFeatures:
        # without a generator: the evaluation view
        x = self.samples.load(modality, rows.cpu()).to(self.model.device, non_blocking=True)
        return features_of(self.model, modality, x, maps=self.maps)

    def _distinct(self, modality: str) -> Int64[Tensor, " r"]:
        if modality not in self._rows:  # sorting all rows at every step would cost more than the look-up
            rows = self.samples.rows[modality]
            self._rows[modality] = torch.unique(rows[rows >= 0])
        return self._rows[modality]


Partner = Callable[[str, Tensor], tuple[Tensor, SampleFeatures | None]]
"""(modality, what a task hands over) -> input of the model, and the other encoders' features of it, if they have the
modality."""


class Fused(nn.Module):
    """A model with a fusion; modalities that the other encoders do not have go unfused.

    Args:
        model: the client's own.
        fusion: of its features with the others'.
        partner: finds what belongs to what a task hands over.
        maps: fuse features by position, and average then.
        unit: bring both sides to unit norm before they are fused (representations instead of embeddings).
        renormalise: bring representations to unit norm after it.
    """

    def __init__(
        self,
        model: Model,
        fusion: GranularityFusion,
        partner: Partner,
        *,
        maps: bool = False,
        unit: bool = True,
        renormalise: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.fusion = model, fusion
        self._partner, self._maps, self._unit, self._renormalise = partner, maps, unit, renormalise

    @property
    def device(self) -> torch.device:
        return self.model.device

    def embed(self, modality: str, x: Tensor) -> Float[Tensor, "b d"]:
        x, other = self._partner(modality, x)
        if other is None:
            return self.model.embed(modality, x)
        own, matched = self._sides(modality, x, other)
        if self._maps:
            return self.fusion.embedding(own.values, matched, own.mask)
        vector: Tensor = self.fusion(own.values, matched)
        return vector

    def positions(self, modality: str, x: Tensor) -> Positions:
        """Fused features by position.

        Raises:
            ConfigError: vectors are fused.
        """
        x, other = self._partner(modality, x)
        if other is None:
            return self.model.positions(modality, x)
        if not self._maps:
            remedy = "set algorithm.fusion.level: maps"
            raise ConfigError(f"the task needs features by position, and vectors are fused; {remedy}")
        own, matched = self._sides(modality, x, other)
        return self.fusion(own.values, matched, own.mask), own.mask

    def _sides(self, modality: str, x: Tensor, other: SampleFeatures) -> tuple[SampleFeatures, Tensor]:
        """Own features, and the others' at the same positions."""
        own = features_of(self.model, modality, x, maps=self._maps)
        if self._unit:
            # both, or the longer one would decide
            own, other = own.unit(), other.unit()
        if not self._maps:
            return own, other.values
        # two encoders see pictures in grids of their own
        return own, match_positions(other.values, other.mask, own.values.shape[1], own.mask)

    def represent(self, modality: str, x: Tensor) -> Float[Tensor, "b d"]:
        """The fused embedding, of unit norm unless ``renormalise`` is off."""
        embedding = self.embed(modality, x).float()
        return F.normalize(embedding, dim=-1) if self._renormalise else embedding


def of_batch(guidance: FusionGuidance, batch: Batch) -> tuple[Partner, Batch]:
    """A batch of training samples that hands over positions in it, and the partner that turns these into its inputs."""
    positions = torch.arange(len(batch), device=batch.index.device)

    def partner(modality: str, chosen: Tensor) -> tuple[Tensor, SampleFeatures | None]:
        x, index = batch.inputs[modality], batch.index
        if len(chosen) < len(batch):  # the samples that have the modality
            x, index = x[chosen], index[chosen]
        is_guided = modality in guidance.samples.modalities
        return x, guidance.of_samples(modality, index) if is_guided else None

    return partner, replace(batch, inputs=dict.fromkeys(batch.inputs, positions))


class RowNumbers:
    """Inputs that hand over the numbers of rows, for ``of_rows``."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __call__(self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None) -> Int64[Tensor, " b"]:
        return rows


def of_rows(guidance: FusionGuidance, samples: Samples) -> tuple[Partner, Samples]:
    """Samples that hand over row numbers, and the partner that turns these into the model's own inputs."""
    inputs, device = samples.inputs, guidance.model.device
    numbered: Mapping[str, RowNumbers] = {name: RowNumbers(len(values)) for name, values in inputs.items()}

    def partner(modality: str, rows: Tensor) -> tuple[Tensor, SampleFeatures | None]:
        x = inputs[modality](rows.cpu()).to(device, non_blocking=True)
        is_guided = modality in guidance.samples.modalities
        return x, guidance.of_rows(modality, rows) if is_guided else None

    return partner, replace(samples, inputs=numbered)
