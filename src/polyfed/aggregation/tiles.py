"""Row-wise log-sum-exp of a |P| x |P| similarity, tile by tile: the matrix is never held."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyfed.losses.running_log_sum_exp import BoundedLogSumExp, RunningLogSumExp

RANGE = 80.0
"""Logits within +-80 bits need no shift: 2^80 x 10^9 terms and 2^-80 are both normal fp32 numbers."""


class TileSize(NamedTuple):
    """Size of a tile."""

    rows: int
    columns: int

    @classmethod
    def suited(cls, device: torch.device) -> TileSize:
        """1 MiB tiles that stay in a core's cache, or 32 MiB ones that fill a GPU."""
        return cls(256, 1024) if device.type == "cpu" else cls(4096, 2048)


class Contrast(NamedTuple):
    """What is scored, and in which tiles."""

    tau: float
    """Temperature."""
    include_self: bool
    """Whether j = k is part of the sum."""
    blocks: TileSize


class RowBlock(NamedTuple):
    """A block of the rows to score."""

    own: Int[Tensor, " r"]
    """Their indices in the public set, ascending, on the CPU."""
    vectors: Float[Tensor, "r d"]
    """Their vectors times the scale of the logits."""
    positive: Float[Tensor, " r"]
    """Their logit against their own partner."""


def row_blocks(
    local: Float[Tensor, "P d"], other: Float[Tensor, "P d"], own: Int[Tensor, " n"], scale: float, size: int
) -> Iterator[RowBlock]:
    """The rows ``own`` of ``local`` times ``scale``, in blocks, at least in fp32."""
    dtype = working_dtype(local, other)
    for part in torch.split(own, size):
        index = part.to(local.device)
        vectors = local.index_select(0, index).to(dtype).mul(scale)
        partners = other.index_select(0, index).to(dtype)
        yield RowBlock(part, vectors, torch.linalg.vecdot(vectors, partners))


def working_dtype(local: Tensor, other: Tensor) -> torch.dtype:
    """The wider of both types, and fp32 at least."""
    return torch.promote_types(torch.promote_types(local.dtype, other.dtype), torch.float32)


def tiled_scores(
    local: Float[Tensor, "P d"],
    other: Float[Tensor, "P d"],
    own: Int[Tensor, " n"],
    contrast: Contrast,
) -> Float[Tensor, " n"]:
    """x_kk - log sum_j exp(x_kj), x = local other^T / tau, for the rows k in ``own``, in their order.

    Inside, logits are in bits (x / ln 2): 2^x takes a third of the time of e^x on a CPU. Scratch is one tile
    and a few vectors of a block's rows and columns.

    Args:
        local: rows.
        other: anchors, in the same order.
        own: indices of the rows, ascending, on the CPU.
        contrast: temperature, whether j = k counts, size of a tile.
    """
    dtype, blocks = working_dtype(local, other), contrast.blocks
    scale = 1 / (contrast.tau * math.log(2))
    sum_type = BoundedLogSumExp if largest_logit(local, other) * scale <= RANGE else RunningLogSumExp
    # one tile for all: allocating it anew each time would leave the heap full of holes
    workspace = torch.empty(blocks.rows * blocks.columns, dtype=dtype, device=local.device)
    scores = []
    for rows in row_blocks(local, other, own, scale, blocks.rows):
        running = sum_type(rows.positive, 2)
        for first in range(0, len(other), blocks.columns):
            anchors = other[first : first + blocks.columns].to(dtype)
            tile = workspace[: len(rows.own) * len(anchors)].view(len(rows.own), len(anchors))
            torch.mm(rows.vectors, anchors.T, out=tile)
            if not contrast.include_self:
                _hide_own(tile, rows.own, first)
            running.add(tile)
        scores.append((rows.positive - running.result()).mul_(math.log(2)))
    return torch.cat(scores)


def largest_logit(local: Tensor, other: Tensor) -> float:
    """Bound on |u_k . g_j| by Cauchy-Schwarz: 1 for unit vectors."""
    norms = [torch.linalg.vector_norm(side, dim=1, dtype=working_dtype(side, side)).amax() for side in (local, other)]
    return float(norms[0] * norms[1])


def _hide_own(tile: Float[Tensor, "r n"], own: Int[Tensor, " r"], first: int) -> None:
    """Set x_kk to -inf where column ``first`` + n of a tile is the row's own."""
    end = first + tile.shape[1]
    if int(own[-1]) < first or int(own[0]) >= end:
        return
    rows = ((own >= first) & (own < end)).nonzero().squeeze(1)
    columns = own[rows] - first
    tile[rows.to(tile.device), columns.to(tile.device)] = -math.inf
