"""Which of a client's items lack a modality, where data that are complete stand for some that are not."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Annotated, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Int64
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.core.effects import require_default
from polyfed.core.settings import Settings

Rate = Annotated[float, Field(gt=0, le=1)]


class MissingSettings(Settings):
    """Take a modality from some of the items of a group's clients; no item loses all that it has."""

    rates: dict[str, Rate] = Field(
        min_length=1, description="modality -> share of items that lack it; together at most one less than there are"
    )
    by: Literal["item", "class", "client"] = Field(
        default="item",
        description="what lacks a modality: items of each client at random; all items of some classes; all items of "
        "some clients",
    )
    concentration: float | None = Field(
        default=None,
        gt=0,
        description="of the Dirichlet distribution around ``rates`` that each client's own rates are drawn from; null: "
        "all clients have ``rates``",
    )
    test: bool = Field(default=False, description="whether the clients' test items lack modalities likewise")

    @model_validator(mode="after")
    def _own_rates(self) -> Self:
        if self.by != "item":
            require_default(self, f"with by: {self.by}", "concentration")
        if self.concentration is not None and sum(self.rates.values()) >= 1:
            raise ValueError(
                f"rates {self.rates} are together 1 or more, and with concentration some items must be complete; lower "
                "them, or leave concentration out"
            )
        return self

    def lacking(
        self, units: int, stream: torch.Generator, rates: Mapping[str, float] | None = None
    ) -> dict[str, Bool[Tensor, " units"]]:
        """Which of some units (items, classes, clients) lack each modality, in shares as near to the rates as can be.

        Without ``rates`` they are those of the settings.

        Units stand around a circle in random order, and modalities are missing on arcs of it, one after the other: as
        few units as can be lack two, and none lacks all.
        """
        order = torch.randperm(units, generator=stream)
        ends = [round(units * share) for share in accumulate((rates or self.rates).values(), initial=0.0)]
        masks = {}
        for name, start, end in zip(self.rates, ends, ends[1:], strict=False):
            masks[name] = torch.zeros(units, dtype=torch.bool)
            masks[name][order[torch.arange(start, end) % units]] = True
        return masks

    def own_rates(self, stream: torch.Generator) -> Mapping[str, float]:
        """The rates of one client, of its training and of its test items."""
        if self.concentration is None:
            return self.rates
        means = [1 - sum(self.rates.values()), *self.rates.values()]
        rng = np.random.default_rng(int(torch.randint(2**63 - 1, (1,), generator=stream)))
        drawn = rng.dirichlet([self.concentration * mean for mean in means])[1:].tolist()
        return dict(zip(self.rates, drawn, strict=True))


Lacking = Mapping[str, Int64[Tensor, " k"]]
"""Modality -> items that lack it."""
