"""Fusion of a client's features with the global ones (GFF of FedAFD, CVPR 2026), and the maps that it can fuse."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.losses.precision import in_full_precision
from polyfed.models.towers import masked_mean


class GranularityFusion(nn.Module):
    """Granularity-aware feature fusion: attentional mix of local and received features, twice (FedAFD).

    ``M(x) = sigmoid(T1(x) + T2(x))``, T1 on the mean over positions, T2 at each position, both with a bottleneck
    and batch norm; ``h = M(l + g) l + (1 - M(l + g)) g``; the result is ``M'(h) l + (1 - M'(h)) g``. On vectors
    T1 and T2 differ in their weights only. Batch norms count valid positions only; a training batch with just
    one uses the running statistics.

    Args:
        dim: width d of the features.
        squeeze: d over the width of the bottleneck.
        shared_global_branch: M' takes T1 of M, a slip of the released code, rather than one of its own.

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

        ``mask`` is true at valid positions; what the result has elsewhere means nothing.

        Raises:
            ValueError: shapes differ, or there is a mask for vectors.
        """
        if local.shape != received.shape:
            raise ValueError(
                f"local features {list(local.shape)} and received ones {list(received.shape)} differ in shape; "
                "bring maps to the same positions with match_positions"
            )
        if mask is not None and mask.shape != local.shape[:-1]:
            raise ValueError(f"mask {list(mask.shape)} for features {list(local.shape)}; one value a position of maps")
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

    Convolutions of size 1 are linear layers, as positions stand before features here.
    """

    def __init__(self, dim: int, squeeze: int) -> None:
        super().__init__()
        hidden = max(1, dim // squeeze)
        self.down = nn.Linear(dim, hidden)
        self.norm1 = PositionNorm(hidden)
        self.up = nn.Linear(hidden, dim)
        self.norm2 = PositionNorm(dim)

    def forward(self, x: Float[Tensor, "b *l d"], mask: Bool[Tensor, " b *l"] | None) -> Float[Tensor, "b *l d"]:
        inner = F.relu(self.norm1(self.down(x), mask))
        out: Tensor = self.norm2(self.up(inner), mask)
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

    def __init__(self, width: int) -> None:
        super().__init__(width)

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
        # on the device: to ask for it would make every step wait
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
    """Resample the map ``g`` to ``length`` positions by adaptive average pooling, to fuse it with a map of so many.

    Output k of m is the mean of the inputs floor(k n / m) to ceil((k + 1) n / m) - 1 of n. In a row with masks, n
    and m count its valid positions. Maps without masks whose lengths are both squares are pictures, read row by
    row and pooled over both axes.

    Args:
        g: features to resample.
        g_mask: which of them are valid; None if all are.
        length: number m of positions wanted.
        mask: which of these are valid; None if all are. Elsewhere the result is 0, as in rows without input.

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
        outputs = inputs.new_ones(len(g), length) if mask is None else mask
        return _windows(inputs, outputs).to(g.dtype) @ g
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
    # rank < ceil((place + 1) size / count), without the rounding
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
