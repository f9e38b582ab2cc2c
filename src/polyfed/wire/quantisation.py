"""Fewer numbers, and shorter ones: eight-bit integers with scales, and the entries of largest magnitude.

Nothing is drawn: equal tensors give equal bits.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float32, Int8, Int32
from torch import Tensor

LEVELS = 127
"""Codes go from -127 to 127; -128 is not used, so that zero is exact and signs are alike."""

_TINY = torch.finfo(torch.float32).tiny


def quantise(values: Float32[Tensor, " n *rest"]) -> tuple[Int8[Tensor, " n *rest"], Float32[Tensor, " n"]]:
    """Codes and one scale for each slice of the first dimension (a row, an output channel).

        s_i = max_j |x_ij| / 127,    q_ij = round(x_ij / s_i) to the nearest, ties to even

    An entry is off by at most s_i / 2 = max_j |x_ij| / 254, and by the rounding of fp32 on top, less than 2^-15 of
    that. Slices below 127 * 2^-126 become zero. One with NaN or infinite entries has such a scale, which
    whoever receives it refuses.
    """
    if not values.numel():
        return values.to(torch.int8), values.new_zeros(len(values))
    rows = values.flatten(1)
    scales = torch.maximum(rows.amax(1), -rows.amin(1)) / LEVELS  # faster than aminmax, and than a copy by abs
    scales = torch.where(scales < _TINY, 0.0, scales)
    codes = rows / torch.where(scales == 0, 1.0, scales)[:, None]
    return codes.round_().to(torch.int8).view(values.shape), scales


def dequantise(codes: Int8[Tensor, " n *rest"], scales: Float32[Tensor, " n"]) -> Float32[Tensor, " n *rest"]:
    """x'_ij = s_i q_ij."""
    return codes.float().mul_(scales.view(-1, *[1] * (codes.ndim - 1)))


def largest_entries(values: Float32[Tensor, "*shape"], share: float) -> Int32[Tensor, " k"]:
    """Where the ceil(share n) entries of largest magnitude are in the flattened tensor, ascending.

    Of equal ones the first are taken. What is not finite counts as largest, so that it cannot go unnoticed.
    """
    sizes = values.flatten().abs()
    sizes = torch.where(sizes.isnan(), torch.inf, sizes)
    count = kept(sizes.numel(), share)
    if not count:
        return sizes.new_zeros(0, dtype=torch.int32)
    least = sizes.topk(count, sorted=False).values.amin()
    chosen = sizes > least
    ties = (sizes == least).nonzero().flatten()
    chosen[ties[: count - int(chosen.sum())]] = True
    return chosen.nonzero().flatten().int()


def kept(entries: int, share: float) -> int:
    """ceil(share n), whatever the last bit of the product."""
    return min(entries, math.ceil(share * entries - 1e-9))
