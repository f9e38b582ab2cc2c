"""Alignment and uniformity of representations (Wang and Isola, ICML 2020), between two views of a batch."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.losses.precision import in_full_precision


@in_full_precision
def alignment(u: Float[Tensor, "b d"], v: Float[Tensor, "b d"], groups: Int64[Tensor, " b"]) -> Float[Tensor, ""]:
    """Mean of ||u_i - v_j||^2 over all i, j of one group, i = j among them; from 0 to 4.

    Args:
        u: first views, unit L2 norm.
        v: second views of the same samples, likewise.
        groups: samples with equal numbers are views of the same thing, as captions of one picture are.
    """
    return (2 - 2 * u @ v.T)[groups[:, None] == groups].mean()


@in_full_precision
def uniformity(
    u: Float[Tensor, "b d"], v: Float[Tensor, "b d"], groups: Int64[Tensor, " b"], t: float = 2.0
) -> Float[Tensor, ""]:
    """log mean of exp(-t ||u_i - v_j||^2) over all i, j of different groups; the lower, the more evenly they spread.

    0 if all samples are of one group. Arguments as ``alignment``.
    """
    squares = (2 - 2 * u @ v.T)[groups[:, None] != groups]
    # of no squares the logarithm is -inf; their sum is 0 and still has a gradient
    return torch.logsumexp(-t * squares, 0) - math.log(len(squares)) if len(squares) else squares.sum()
