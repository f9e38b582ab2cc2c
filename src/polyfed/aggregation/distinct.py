"""Distinct rows of samples among which some repeat, as an image does in a sample for each of its captions.

``inverse_index`` gives the distinct row of each sample, as ``Samples.distinct`` does; None: every sample has a row of
its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor


def distinct_count(inverse_index: Int64[Tensor, " n"]) -> int:
    """Number of distinct rows."""
    return int(inverse_index.max()) + 1 if len(inverse_index) else 0


def packed(values: Shaped[Tensor, "n ..."], inverse_index: Int64[Tensor, " n"] | None) -> Shaped[Tensor, "k ..."]:
    """The distinct rows, from rows of all samples.

    >>> packed(torch.tensor([[1.0], [1.0], [2.0]]), torch.tensor([0, 0, 1])).tolist()
    [[1.0], [2.0]]
    """
    if inverse_index is None:
        return values
    # samples that share a row have equal ones, so that it does not matter whose is taken
    rows = values.new_zeros(distinct_count(inverse_index), *values.shape[1:])
    return rows.index_copy_(0, inverse_index.to(values.device), values)


def unpacked(values: Shaped[Tensor, "k ..."], inverse_index: Int64[Tensor, " n"] | None) -> Shaped[Tensor, "n ..."]:
    """The rows of all samples, from the distinct ones."""
    return values if inverse_index is None else values[inverse_index.to(values.device)]


class Distinct(NamedTuple):
    """Distinct rows, which of them each sample has, and how many samples have each.

    >>> distinct = Distinct.of(torch.tensor([[1.0], [1.0], [2.0]]), torch.tensor([0, 0, 1]))
    >>> distinct.rows.tolist(), distinct.counts.tolist()
    ([[1.0], [2.0]], [2.0, 1.0])
    """

    rows: Float[Tensor, "k w"]
    inverse_index: Int64[Tensor, " n"]
    counts: Float[Tensor, " k"]
    items: Int64[Tensor, " k"] | None
    """Number of the item behind each row, where that matters."""

    @classmethod
    def of(
        cls,
        values: Float[Tensor, "n w"],
        inverse_index: Int64[Tensor, " n"] | None,
        items: Int64[Tensor, " n"] | None = None,
    ) -> Distinct:
        """Distinct rows among those of all samples; samples that share a row are of one item."""
        rows = packed(values, inverse_index)
        items = None if items is None else packed(items.to(values.device), inverse_index)
        if inverse_index is None:
            return cls(rows, torch.arange(len(rows), device=rows.device), rows.new_ones(len(rows)), items)
        inverse_index = inverse_index.to(values.device)
        return cls(rows, inverse_index, torch.bincount(inverse_index, minlength=len(rows)).to(rows.dtype), items)

    def of_samples(self, index: Int64[Tensor, " m"]) -> Float[Tensor, "m w"]:
        """The rows of the samples at ``index``."""
        return self.rows[self.inverse_index[index]]
