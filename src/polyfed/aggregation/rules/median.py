"""Coordinate-wise median."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyfed.aggregation.robust_rule import BufferingRule, stacked


class Median(BufferingRule):
    """Coordinate-wise median of a type's clients (Yin et al., ICML 2018, Definition 1).

    Of an even number, the mean of the two in the middle. Each coordinate of the result lies between honest values as
    long as f < n / 2. What n clients send of one tensor is held and sorted at a time.
    """

    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        """The median of each coordinate; ``false`` says only how many clients there must be."""
        return [_median(tensors) for tensors in zip(*values, strict=True)]


def _median(tensors: Sequence[Tensor]) -> Tensor:
    ordered, n = stacked(tensors).sort(dim=0).values, len(tensors)
    return ordered[n // 2] if n % 2 else ordered[n // 2 - 1 : n // 2 + 1].mean(0)
