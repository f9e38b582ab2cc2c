"""Which of a client's items lack a modality, where data that are complete stand for some that are not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Int64
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.core.effects import require_default
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings
from polyfed.data.item_classes import ItemClasses

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

    def require_fit(self, encoded: Sequence[Collection[str]], count: int, test_split: str | None) -> None:
        """Check that the rates suit a group.

        Args:
            encoded: modalities that each of its models encodes of samples.
            count: number of its clients.
            test_split: where their test items come from.

        Raises:
            ValueError: a modality is not encoded by all, an item would lose all that it has, or nothing would be lost.
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
        if self.by == "client" and round(count * total) == 0:
            raise ValueError(
                f"missing.rates {self.rates} by client take nothing from {count} clients; raise them, or choose by: "
                "item"
            )
        if self.test and test_split is None:
            raise ValueError("missing.test: there is no test_split; leave it out")

    def units(
        self, count: int, stream: torch.Generator, rates: Mapping[str, float] | None = None
    ) -> dict[str, Bool[Tensor, " count"]]:
        """Which of ``count`` units (items, classes, clients) lack each modality, as near to the rates as can be.

        Units stand around a circle in random order, and modalities are missing on arcs of it, one after the other: as
        few units as can be lack two, and none lacks all.

        Args:
            count: number of units.
            stream: the only source of randomness.
            rates: modality -> share; None: those of the settings.
        """
        order = torch.randperm(count, generator=stream)
        ends = [round(count * share) for share in accumulate((rates or self.rates).values(), initial=0.0)]
        masks = {}
        for name, start, end in zip(self.rates, ends, ends[1:], strict=False):
            masks[name] = torch.zeros(count, dtype=torch.bool)
            masks[name][order[torch.arange(start, end) % count]] = True
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


@dataclass(frozen=True)
class GroupGaps:
    """What the items of one group's clients lack.

    Attributes:
        settings: rates, and what lacks modalities.
        name: of the group, or of what its clients hold in addition.
        count: number of its clients.
        seed: of the run.
    """

    settings: MissingSettings
    name: str
    count: int
    seed: int

    @property
    def group(self) -> str:
        """What clients hold in addition lacks what their own items lack."""
        return self.name.removesuffix(".also")

    def of(
        self,
        items: Int64[Tensor, " k"],
        client: int,
        classes: Callable[[], Sequence[ItemClasses]],
        *,
        test: bool = False,
        is_shared: bool = False,
    ) -> Lacking:
        """Which of a client's items lack each modality.

        Args:
            items: its training or test items, ascending.
            client: its place in the group.
            classes: gives the classes of these items, then of others that are numbered with them; none without any.
            test: whether they are test items.
            is_shared: whether all clients are tested on them: they lack the same for all then, at the group's rates.

        Raises:
            ConfigError: classes are to lack modalities, and there are none.
        """
        if self.settings.by == "client":
            masks = self.settings.units(self.count, generator(self.seed, "missing", self.group))
            return {name: items if bool(mask[client]) else items[:0] for name, mask in masks.items()}
        if self.settings.by == "item":
            return self._by_item(items, "test " if test else "", None if is_shared else client)
        return self._by_class(items, classes())

    def _by_item(self, items: Int64[Tensor, " k"], prefix: str, client: int | None) -> Lacking:
        """At a client's own rates; for None, which is all of them, at the group's."""
        whose = f"{prefix}{'all' if client is None else client}"
        own = None if client is None else generator(self.seed, "missing rates", self.group, client)
        rates = self.settings.rates if own is None else self.settings.own_rates(own)
        masks = self.settings.units(len(items), generator(self.seed, "missing", self.name, whose), rates)
        return {name: items[mask] for name, mask in masks.items()}

    def _by_class(self, items: Int64[Tensor, " k"], known: Sequence[ItemClasses]) -> Lacking:
        if not known:
            raise ConfigError(
                f"clients.{self.group}.missing.by is class, but the items of its source have no labels; choose item or "
                "client, or name columns in partition.of"
            )
        count = 1 + max(one.highest for one in known)
        masks = self.settings.units(count, generator(self.seed, "missing", self.group))
        return {name: items[mask[known[0].numbers[items]]] for name, mask in masks.items()}
