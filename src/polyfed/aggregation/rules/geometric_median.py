"""Geometric median."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.robust_rule import BufferingRule, squared_distances, weighted_sum


class GeometricMedian(BufferingRule):
    """The point of least summed distance to the clients (RFA: Pillutla et al., IEEE TSP 2022, Algorithm 2).

    Smoothed Weiszfeld steps with equal weights of clients, over all tensors of a reply together, so that a client
    counts or does not as a whole. v = sum_k a_k x_k all the while, and |v - x_j|^2 = (D a)_j - a^T D a / 2 with the
    squared distances D between clients, so steps cost n^2, whatever the model.
    """

    steps: int = Field(default=100, ge=1, description="Weiszfeld steps at most; the paper finds 3 enough")
    smoothing: float = Field(
        default=1e-6, gt=0, lt=1, description="distances count as this share of the median one at least (nu)"
    )

    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        """The weighted sum at which the steps end."""
        return weighted_sum(values, self.weights(squared_distances(values)))

    def weights(self, squared: Float[Tensor, "n n"]) -> Float[Tensor, " n"]:
        """Weights a of the clients, of sum 1, from the squared distances between them."""
        n = len(squared)
        a = torch.full((n,), 1 / n, dtype=torch.float64)
        apart = squared[~torch.eye(n, dtype=torch.bool)]
        floor = self.smoothing * float(apart.median().sqrt()) if n > 1 else 0.0
        if not floor:
            floor = self.smoothing  # most clients are at one point, which is where the steps go
        for _ in range(self.steps):
            distances = (squared @ a - a @ squared @ a / 2).clamp_min(0).sqrt()
            new = 1 / distances.clamp_min(floor)
            new = new / new.sum()
            moved, a = float((new - a).abs().max()), new
            if moved < 1e-12:
                break
        return a
