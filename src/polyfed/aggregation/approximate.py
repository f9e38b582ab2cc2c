"""Contrastive scores with less work than the |P| x |P| product in full precision."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyfed.aggregation.tiles import (
    Contrast,
    Rows,
    bf16_product,
    full_product,
    row_blocks,
    tiled_scores,
    working_dtype,
)

ROWS = 256
"""Rows at a time, where there is no tile."""


def bf16_scores(
    local: Float[Tensor, "P d"],
    other: Float[Tensor, "P d"],
    own: Int[Tensor, " n"],
    contrast: Contrast,
    samples: int,
    generator: torch.Generator,
) -> Float[Tensor, " n"]:
    """The exact sum over products of vectors rounded to bf16; ``samples`` and ``generator`` play no part."""
    return tiled_scores(local, other, own, contrast, bf16_product)


def sampled_scores(
    local: Float[Tensor, "P d"],
    other: Float[Tensor, "P d"],
    own: Int[Tensor, " n"],
    contrast: Contrast,
    samples: int,
    generator: torch.Generator,
) -> Float[Tensor, " n"]:
    """The sum over j != k estimated from ``samples`` anchors, drawn without replacement (all: exact)."""
    if samples >= len(other):
        return tiled_scores(local, other, own, contrast, full_product)
    chosen = torch.randperm(len(other), generator=generator)[:samples]
    anchors = other[chosen.to(other.device)].to(working_dtype(local, other))
    blocks = row_blocks(local, other, own, 1 / contrast.tau, ROWS)
    return torch.cat([_sampled(rows, anchors, chosen, len(other), contrast.include_self) for rows in blocks])


def _sampled(
    rows: Rows, anchors: Float[Tensor, "s d"], chosen: Int[Tensor, " s"], total: int, include_self: bool
) -> Float[Tensor, " r"]:
    own = (rows.own[:, None] == chosen).to(anchors.device)
    logits = (rows.vectors @ anchors.T).masked_fill_(own, -math.inf)
    others = len(chosen) - own.sum(1)
    partition = logits.logsumexp(1) + math.log(total - 1) - others.log()
    return rows.positive - (torch.logaddexp(partition, rows.positive) if include_self else partition)


def cumulant_scores(
    local: Float[Tensor, "P d"],
    other: Float[Tensor, "P d"],
    own: Int[Tensor, " n"],
    contrast: Contrast,
    samples: int,
    generator: torch.Generator,
) -> Float[Tensor, " n"]:
    """log sum_j exp(x_j) taken as log n + mean(x) + var(x) / 2, the cumulants up to the second, in O(P d^2).

    Right for logits that are near normal or of small variance: unit vectors at a temperature near 1. The
    moments of x_j = u . g_j / tau over j come from the mean and second moment of g; those over j != k have
    the term k taken out. ``samples`` and ``generator`` play no part.
    """
    anchors = other.to(working_dtype(local, other))
    mean, moment = anchors.mean(0), (anchors.T @ anchors).div_(len(anchors))
    blocks = row_blocks(local, other, own, 1 / contrast.tau, ROWS)
    return torch.cat([_cumulant(rows, mean, moment, len(other), contrast.include_self) for rows in blocks])


def _cumulant(
    rows: Rows, mean: Float[Tensor, " d"], moment: Float[Tensor, "d d"], count: int, include_self: bool
) -> Float[Tensor, " r"]:
    first: Tensor = rows.vectors @ mean
    second: Tensor = torch.linalg.vecdot(rows.vectors @ moment, rows.vectors)
    if not include_self:
        first = (count * first - rows.positive) / (count - 1)
        second = (count * second - rows.positive.square()) / (count - 1)
        count -= 1
    return rows.positive - (math.log(count) + first + (second - first.square()) / 2)
