"""Rows of samples in which some repeat, as a picture does in a sample for each of its captions: each distinct row once.

``places`` say which distinct row each sample has, as of ``Samples.distinct``; None: every sample has one of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor


def distinct_count(places: Int64[Tensor, " n"]) -> int:
    return int(places.max()) + 1 if len(places) else 0


def packed(values: Shaped[Tensor, "n ..."], places: Int64[Tensor, " n"] | None) -> Shaped[Tensor, "k ..."]:
    """The distinct rows, from rows of all samples."""
    if places is None:
        return values
    # samples that share a row have equal ones, so that it does not matter whose is taken
    return values.new_zeros(distinct_count(places), *values.shape[1:]).index_copy_(0, places.to(values.device), values)


def unpacked(values: Shaped[Tensor, "k ..."], places: Int64[Tensor, " n"] | None) -> Shaped[Tensor, "n ..."]:
    return values if places is None else values[places.to(values.device)]


class Distinct(NamedTuple):
    """Distinct rows, which of them each sample has, and how many samples have each."""

    rows: Float[Tensor, "k w"]
    places: Int64[Tensor, " n"]
    counts: Float[Tensor, " k"]
    items: Int64[Tensor, " k"] | None
    """Number of the item behind each row, where that matters."""

    @classmethod
    def of(
        cls,
        values: Float[Tensor, "n w"],
        places: Int64[Tensor, " n"] | None,
        items: Int64[Tensor, " n"] | None = None,
    ) -> Distinct:
        """Those among the rows of all samples; samples that share a row are of one item."""
        if places is None:
            places = torch.arange(len(values))
        places = places.to(values.device)
        rows = packed(values, places)
        counts = torch.bincount(places, minlength=len(rows)).to(rows.dtype)
        return cls(rows, places, counts, None if items is None else packed(items.to(values.device), places))

    def of_samples(self, index: Int64[Tensor, " m"]) -> Float[Tensor, "m w"]:
        """The rows of the samples at ``index``."""
        return self.rows[self.places[index]]
