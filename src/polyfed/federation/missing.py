"""Which of a client's items lack a modality, where data that are complete stand for some that are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Annotated

import torch
from jaxtyping import Int64
from pydantic import Field
from torch import Tensor

from polyfed.core.settings import Settings

Lacking = Mapping[str, Int64[Tensor, " k"]]
"""Modality -> items that lack it."""

Rate = Annotated[float, Field(gt=0, le=1)]


class MissingSettings(Settings):
    """Take a modality from some of the items of a group's clients; no item loses all that it has."""

    rates: dict[str, Rate] = Field(
        min_length=1, description="modality -> share of items that lack it; together at most one less than there are"
    )
    test: bool = Field(default=False, description="whether the clients' test items lack modalities likewise")

    def require_fit(self, encoded: Sequence[Collection[str]], test_split: str | None) -> None:
        """Check that the rates suit a group.

        Args:
            encoded: modalities that each of its models encodes of samples.
            test_split: where their test items come from.

        Raises:
            ValueError: a modality is not encoded by all, or an item would lose all that it has.
        """
        total = sum(self.rates.values())
        for modalities in encoded:
            unknown = [name for name in self.rates if name not in modalities]
            if unknown:
                raise ValueError(f"missing.rates names '{unknown[0]}', which not all models of the group encode")
            if total > len(modalities) - 1:
                raise ValueError(
                    f"missing.rates {self.rates} are together more than {len(modalities) - 1}, so that items would "
                    f"lack all of the {len(modalities)} modalities that a model encodes; lower them"
                )
        if self.test and test_split is None:
            raise ValueError("missing.test: there is no test_split; leave it out")

    def lacking(self, items: Int64[Tensor, " n"], stream: torch.Generator) -> Lacking:
        """Which of the items lack each modality, as near to the rates as can be.

        Items stand around a circle in random order, and modalities are missing on arcs of it, one after the other: as
        few items as can be lack two, and none lacks all.

        Args:
            items: of a client, ascending.
            stream: the only source of randomness.
        """
        order = torch.randperm(len(items), generator=stream)
        ends = [round(len(items) * share) for share in accumulate(self.rates.values(), initial=0.0)]
        lacking = {}
        for name, start, end in zip(self.rates, ends, ends[1:], strict=False):
            mask = torch.zeros(len(items), dtype=torch.bool)
            mask[order[torch.arange(start, end) % len(items)]] = True
            lacking[name] = items[mask]
        return lacking
