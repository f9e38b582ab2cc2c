"""Balanced soft assignments by Sinkhorn-Knopp (Cuturi 2013), as in SwAV (Caron et al. 2020)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from polyfed.losses.precision import in_full_precision


@torch.no_grad()
@in_full_precision
def sinkhorn(scores: Float[Tensor, "b k"], epsilon: float = 0.05, iterations: int = 3) -> Float[Tensor, "b k"]:
    """How much each of k prototypes stands for each of b samples, every prototype being used alike; a constant.

    Columns, then rows of exp(scores / epsilon) are scaled in turn. In the end a row adds up to 1, and with many
    iterations a column to b / k. Computed with logarithms, so scores of any size will do.

    Args:
        scores: similarity of samples and prototypes; finite.
        epsilon: small: hard assignments.
        iterations: number of scalings of both; 0 leaves the softmax of each row.
    """
    logs = scores / epsilon
    for _ in range(iterations):
        logs = logs.log_softmax(0).log_softmax(1)
    return logs.softmax(1)
