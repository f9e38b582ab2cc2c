"""Coordinate-wise trimmed mean."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyfed.aggregation.robust_rule import BufferingRule, stacked


class TrimmedMean(BufferingRule):
    """Coordinate-wise trimmed mean (Yin et al., ICML 2018, Definition 2).

    Of each coordinate the f largest and the f smallest values are left out, the others averaged. With f = 1 of 10 it is
    nearer to the mean than the median is; false clients beyond f move it as they move a mean.
    """

    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        return [
            stacked(tensors).sort(dim=0).values[false : len(tensors) - false].mean(0)
            for tensors in zip(*values, strict=True)
        ]
