"""Fusion of a client's features with the global ones (GFF of FedAFD, CVPR 2026), and models that embed by it.

Tasks take a fused model as a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch, Samples
from polyfed.losses.precision import in_full_precision
from polyfed.models.model import Model
from polyfed.models.towers import Positions, masked_mean, positioned


class GranularityFusion(nn.Module):
    """Granularity-aware feature fusion (FedAFD; T1 and T2: supplement, A.2.2, Eq. 4 and 5).

    An attentional mix of local and received features, twice.

    ``M(x) = sigmoid(T1(x) + T2(x))``, T1 on the mean over positions, T2 at each position, both with a bottleneck
    and batch norm; ``h = M(l + g) l + (1 - M(l + g)) g``; the result is ``M'(h) l + (1 - M'(h)) g``. On vectors
    T1 and T2 differ in their weights only. Batch norms count valid positions only; a training batch with just
    one uses the running statistics.

    Args:
        dim: width d of the features.
        squeeze: d over the width of the bottleneck.
        shared_global_branch: M' uses T1 of M, a slip of the released code, rather than one of its own.

    >>> fusion = GranularityFusion(dim=8).eval()
    >>> local, received = torch.ones(2, 8), torch.zeros(2, 8)
    >>> fused = fusion(local, received)
    >>> bool(((fused > 0) & (fused < 1)).all())
    True
    """

    def __init__(self, dim: int, squeeze: int = 4, *, shared_global_branch: bool = False) -> None:
        super().__init__()
        self.pooled = nn.ModuleList(_Branch(dim, squeeze) for _ in range(1 if shared_global_branch else 2))
        self.pointwise = nn.ModuleList(_Branch(dim, squeeze) for _ in range(2))

    def forward(
        self, local: Float[Tensor, "b *l d"], received: Float[Tensor, "b *l d"], mask: Bool[Tensor, "b l"] | None = None
    ) -> Float[Tensor, "b *l d"]:
        """Fused vectors, or maps with the positions of the given ones.

        ``mask`` is true at valid positions; the result is undefined elsewhere.

        Raises:
            ValueError: shapes differ, or there is a mask for vectors.
        """
        if local.shape != received.shape:
            raise ValueError(
                f"local features {list(local.shape)} and received ones {list(received.shape)} differ in shape; "
                "bring maps to the same positions with match_positions"
            )
        if mask is not None and mask.shape != local.shape[:-1]:
            raise ValueError(f"mask {list(mask.shape)} for features {list(local.shape)}; give one value per position")
        if local.dim() == 2:
            return self.forward(local.unsqueeze(1), received.unsqueeze(1)).squeeze(1)
        first = _mixed(self.attention(local + received, 0, mask), local, received)
        return _mixed(self.attention(first, 1, mask), local, received)

    def embedding(
        self, local: Float[Tensor, "b *l d"], received: Float[Tensor, "b *l d"], mask: Bool[Tensor, "b l"] | None = None
    ) -> Float[Tensor, "b d"]:
        """Mean of the fused map over its valid positions, zero in a row without any; of vectors that of ``forward``."""
        fused: Tensor = self(local, received, mask)
        return fused if fused.dim() == 2 else _mean(fused, mask)

    def attention(
        self, x: Float[Tensor, "b l d"], stage: int, mask: Bool[Tensor, "b l"] | None = None
    ) -> Float[Tensor, "b l d"]:
        """Share of the local features, in (0, 1): M(x) at stage 0, M'(x) at stage 1."""
        # with a shared branch both stages have the one
        overall = self.pooled[stage % len(self.pooled)]
        # a sample without positions has no mean that could count in a batch norm
        some = None if mask is None else mask.any(1)
        return _share(overall(_mean(x, mask), some).unsqueeze(1), self.pointwise[stage](x, mask))


class _Branch(nn.Module):
    """T1 or T2: 1x1 convolution to the bottleneck, batch norm, ReLU, 1x1 convolution back, batch norm.

    Convolutions of size 1 are linear layers, as positions stand before features here. Eq. 4 and 5 leave the activation
    and the width of the bottleneck open; ReLU and d / 4 are the released code's.
    """

    def __init__(self, dim: int, squeeze: int) -> None:
        super().__init__()
        hidden = max(1, dim // squeeze)
        self.down = nn.Linear(dim, hidden)
        self.norm1 = PositionNorm(hidden)
        self.up = nn.Linear(hidden, dim)
        self.norm2 = PositionNorm(dim)

    def forward(self, x: Float[Tensor, "b *l d"], mask: Bool[Tensor, " b *l"] | None) -> Float[Tensor, "b *l d"]:
        out: Tensor = self.norm2(self.up(F.relu(self.norm1(self.down(x), mask))), mask)
        return out


class PositionNorm(nn.BatchNorm1d):
    """Batch normalisation of each feature over samples and their valid positions.

    A training batch with a single valid position has no variance: it is normalised by the running statistics,
    which it leaves as they are.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def forward(self, input: Float[Tensor, "*b c"], mask: Bool[Tensor, "*b"] | None = None) -> Float[Tensor, "*b c"]:
        """Normalised features; ``mask`` is true where valid, and matters only in training."""
        if self.training and mask is not None:
            return self._over_valid(input, mask)
        flat = input.flatten(0, -2)
        if self.training and len(flat) > 1:
            return super().forward(flat).view_as(input)
        normed = F.batch_norm(flat, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return normed.view_as(input)

    def _over_valid(self, x: Tensor, mask: Tensor) -> Tensor:
        mean, variance, count = _moments(x, mask)
        # on the device: fetching it would make every step wait
        several = count > 1
        shift = torch.where(several, mean, self.running_mean)
        scale = torch.rsqrt(torch.where(several, variance, self.running_var) + self.eps) * self.weight
        unbiased = variance.detach() * count / (count - 1).clamp(min=1)
        with torch.no_grad():
            for running, value in ((self.running_mean, mean.detach()), (self.running_var, unbiased)):
                # through .data: torch's batch norm of an earlier call in this step has saved these tensors, unneeded
                running.data.lerp_(torch.where(several, value, running).to(running.dtype), self.momentum)
            self.num_batches_tracked += several
        return ((x - shift) * scale + self.bias).to(x.dtype)


def match_positions(
    g: Float[Tensor, "b n d"], g_mask: Bool[Tensor, "b n"] | None, length: int, mask: Bool[Tensor, "b m"] | None = None
) -> Float[Tensor, "b m d"]:
    """Resample the map ``g`` to ``length`` positions by adaptive average pooling, to fuse it with a map of that length.

    Output k of m is the mean of the inputs floor(k n / m) to ceil((k + 1) n / m) - 1 of n. In a row with masks, n
    and m count its valid positions. Maps without masks whose lengths are both squares are images, read row by
    row and pooled over both axes.

    Args:
        g: features to resample.
        g_mask: true where they are valid; None if all are.
        length: number m of positions wanted.
        mask: true where these are valid; None if all are. Elsewhere the result is 0, as in rows without input.

    Raises:
        ValueError: ``mask`` has another length.

    >>> features = torch.arange(6.0).reshape(1, 6, 1)
    >>> match_positions(features, None, 3).flatten()
    tensor([0.5000, 2.5000, 4.5000])
    """
    if mask is not None and mask.shape[1] != length:
        raise ValueError(f"mask of {mask.shape[1]} positions for a map of {length}; pass the mask of that map")
    if g_mask is not None or mask is not None:
        inputs = torch.ones_like(g[..., 0], dtype=torch.bool) if g_mask is None else g_mask
        return _windows(inputs, inputs.new_ones(len(g), length) if mask is None else mask).to(g.dtype) @ g
    if g.shape[1] == length:
        return g
    side, wanted = math.isqrt(g.shape[1]), math.isqrt(length)
    # a sequence: one axis
    if side**2 != g.shape[1] or wanted**2 != length:
        return _axis(g, g.shape[1], length) @ g
    windows = _axis(g, side, wanted)
    return torch.einsum("hi,bijd,wj->bhwd", windows, g.reshape(len(g), side, side, g.shape[2]), windows).flatten(1, 2)


def _axis(g: Tensor, count: int, length: int) -> Float[Tensor, "m n"]:
    """Weights of all of ``count`` inputs in each of ``length`` means, of the type of ``g``."""
    inputs, outputs = (torch.ones(1, size, dtype=torch.bool, device=g.device) for size in (count, length))
    return _windows(inputs, outputs)[0].to(g.dtype)


def _windows(inputs: Bool[Tensor, "b n"], outputs: Bool[Tensor, "b m"]) -> Float[Tensor, "b m n"]:
    """Weight of each input in each output; rows of valid outputs sum to 1 where there is a valid input."""
    position, count = (outputs.cumsum(1) - 1).unsqueeze(2), outputs.sum(1).clamp(min=1)[:, None, None]
    rank, size = (inputs.cumsum(1) - 1).unsqueeze(1), inputs.sum(1)[:, None, None]
    # rank < ceil((position + 1) size / count), without the rounding
    inside = (rank >= position * size // count) & (rank * count < (position + 1) * size)
    chosen = inside & inputs.unsqueeze(1) & outputs.unsqueeze(2)
    return chosen / chosen.sum(2, keepdim=True).clamp(min=1)


@in_full_precision
def _share(first: Tensor, second: Tensor) -> Tensor:
    """Sigmoid of the sum; in 16 bits it would reach 1."""
    return torch.sigmoid(first + second)


@in_full_precision
def _moments(x: Float[Tensor, "*b c"], mask: Bool[Tensor, "*b"]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of each feature where ``mask`` is true, and the number of such positions."""
    padding = ~mask.unsqueeze(-1)
    axes = tuple(range(mask.dim()))
    count = mask.sum()
    mean = x.masked_fill(padding, 0).sum(axes) / count.clamp(min=1)
    variance = (x - mean).masked_fill(padding, 0).square().sum(axes) / count.clamp(min=1)
    return mean, variance, count


def _mixed(share: Tensor, local: Tensor, received: Tensor) -> Tensor:
    return share * local + (1 - share) * received


def _mean(x: Float[Tensor, "b l d"], mask: Bool[Tensor, "b l"] | None) -> Float[Tensor, "b d"]:
    return x.mean(1) if mask is None else masked_mean(x, mask)


class SampleFeatures(NamedTuple):
    """Features of samples: vectors [b, d], or features by position [b, l, d] and their mask."""

    values: Float[Tensor, "b *l d"]
    mask: Bool[Tensor, "b l"] | None = None

    def at(self, index: Int64[Tensor, " k"]) -> SampleFeatures:
        """Features of the samples at ``index``."""
        return SampleFeatures(self.values[index], None if self.mask is None else self.mask[index])

    def unit(self) -> SampleFeatures:
        return self._replace(values=F.normalize(self.values.float(), dim=-1))


def features_of(model: Model, modality: str, x: Tensor, *, maps: bool) -> SampleFeatures:
    """Features of a batch by a model's encoder, before normalisation.

    Raises:
        ConfigError: features by position are requested from an encoder that has none.
    """
    if not maps:
        return SampleFeatures(model.embed(modality, x))
    encoder = model.encoders[modality]
    if not positioned(encoder):
        raise ConfigError(
            f"algorithm.fusion.level is maps, but the encoder of '{modality}' ({type(encoder).__name__}) gives no "
            "features by position; choose another encoder, or algorithm.fusion.level=vectors"
        )
    # not through embed: the mean over positions comes after the fusion
    values, mask = encoder.positions(x)
    return SampleFeatures(values if model.final_norm is None else model.final_norm(values), mask)


@dataclass
class FusionGuidance:
    """Features of a client's samples by the server's frozen encoders, in the evaluation view, row by row of a modality.

    Attributes:
        model: the server's encoders, frozen.
        samples: the client's samples in their views.
        maps: features by position instead of vectors.
        batch: rows at a time.
        tables: modality -> features of its distinct rows, ascending, once they are computed.
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
        """Features of the samples at ``index``; encoded now unless ``compute`` has done so."""
        if (table := self.tables.get(modality)) is None:
            return self.encoded(modality, self.samples.rows[modality][index.cpu()])
        if modality not in self._inverse_index:  # where the table is, so that a step need not wait for a GPU
            inverse_index = torch.searchsorted(self._distinct(modality), self.samples.rows[modality])
            self._inverse_index[modality] = inverse_index.to(table.values.device)
        return table.at(self._inverse_index[modality][index.to(table.values.device)])

    def of_rows(self, modality: str, rows: Int64[Tensor, " b"]) -> SampleFeatures:
        if (table := self.tables.get(modality)) is None:
            return self.encoded(modality, rows)
        return table.at(torch.searchsorted(self._distinct(modality), rows.cpu()).to(table.values.device))

    @torch.no_grad()
    def encoded(self, modality: str, rows: Int64[Tensor, " b"]) -> SampleFeatures:
        # without a generator: the evaluation view
        x = self.samples.load(modality, rows.cpu()).to(self.model.device)
        return features_of(self.model, modality, x, maps=self.maps)

    def _distinct(self, modality: str) -> Int64[Tensor, " r"]:
        if modality not in self._rows:  # sorting all rows at every step would cost more than the look-up
            rows = self.samples.rows[modality]
            self._rows[modality] = torch.unique(rows[rows >= 0])
        return self._rows[modality]


Partner = Callable[[str, Tensor], tuple[Tensor, SampleFeatures | None]]
"""(modality, value that a task passes) -> the model's input, and the other encoders' features of it, if any."""


class Fused(nn.Module):
    """A model with a fusion; modalities without other encoders are not fused.

    Args:
        model: the client's own model.
        fusion: fusion of its features with the others'.
        partner: maps the value that a task passes to the model's input and the others' features.
        maps: fuse features by position, then average.
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
            raise ConfigError("the task needs features by position; set algorithm.fusion.level: maps")
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
        # two encoders divide images into different grids
        return own, match_positions(other.values, other.mask, own.values.shape[1], own.mask)

    def represent(self, modality: str, x: Tensor) -> Float[Tensor, "b d"]:
        """The fused embedding, of unit norm unless ``renormalise`` is off."""
        embedding = self.embed(modality, x).float()
        return F.normalize(embedding, dim=-1) if self._renormalise else embedding


def of_batch(guidance: FusionGuidance, batch: Batch) -> tuple[Partner, Batch]:
    """Partner for a training batch, and the batch with positions in it as inputs, which the partner resolves."""
    positions = torch.arange(len(batch), device=batch.index.device)

    def partner(modality: str, chosen: Tensor) -> tuple[Tensor, SampleFeatures | None]:
        x, index = batch.inputs[modality], batch.index
        if len(chosen) < len(batch):  # the samples that have the modality
            x, index = x[chosen], index[chosen]
        return x, guidance.of_samples(modality, index) if modality in guidance.samples.modalities else None

    return partner, replace(batch, inputs=dict.fromkeys(batch.inputs, positions))


class RowNumbers:
    """Inputs that are numbers of rows, for ``of_rows``."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __call__(self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None) -> Int64[Tensor, " b"]:
        return rows


def of_rows(guidance: FusionGuidance, samples: Samples) -> tuple[Partner, Samples]:
    """Partner for samples, and the samples with row numbers as inputs, which the partner resolves."""
    inputs, device = samples.inputs, guidance.model.device
    numbered: Mapping[str, RowNumbers] = {name: RowNumbers(len(values)) for name, values in inputs.items()}

    def partner(modality: str, rows: Tensor) -> tuple[Tensor, SampleFeatures | None]:
        x = inputs[modality](rows.cpu()).to(device, non_blocking=True)
        return x, guidance.of_rows(modality, rows) if modality in guidance.samples.modalities else None

    return partner, replace(samples, inputs=numbered)
