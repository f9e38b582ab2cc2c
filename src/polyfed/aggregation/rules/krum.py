"""Krum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from polyfed.aggregation.robust_rule import BufferingRule, squared_distances, weighted_sum


class Krum(BufferingRule):
    """The reply with the closest neighbours (Blanchard et al., NeurIPS 2017, section 4).

    A client's score is the sum of the squared distances to its n - f - 2 nearest others, over all tensors of a reply
    together; the one with the lowest score stands for all, bit for bit, of equal scores the first. So what the others
    have learnt is lost.
    """

    factor: ClassVar[int] = 2
    beside: ClassVar[int] = 3

    def chosen(self, clients: int, false: int) -> int:
        return 1

    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        """The mean of the replies that are chosen."""
        order = scores(squared_distances(values), false).sort(stable=True).indices[: self.chosen(len(values), false)]
        weights = torch.zeros(len(values), dtype=torch.float64)
        weights[order] = 1 / len(order)
        return weighted_sum(values, weights)


def scores(squared: Float[Tensor, "n n"], false: int) -> Float[Tensor, " n"]:
    """Sums of the squared distances to the n - f - 2 nearest others."""
    nearest = squared.sort(dim=1).values[:, 1 : len(squared) - false - 1]  # the first is its own, 0
    return nearest.sum(1)
