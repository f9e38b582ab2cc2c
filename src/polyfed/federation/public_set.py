"""The public set: which items it has, how participants see them, and what identifies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator
from polyfed.data.assembly import of_column, of_items, order_of
from polyfed.data.digests import content_digests
from polyfed.data.mentions import mentioning
from polyfed.data.samples import Samples
from polyfed.data.source import Column, Split
from polyfed.federation.opened_data import OpenedData, Views
from polyfed.federation.settings import GroupSettings, PublicSettings


@dataclass(frozen=True)
class PublicSet:
    """The public set P of a federation, in a fixed order that depends on the seed alone.

    Attributes:
        settings: which source it is drawn from, and how much of it.
        groups: the clients' groups by name; ``without`` may mean the class names of their sources.
        data: opens its split.
        seed: of the run.
    """

    settings: PublicSettings
    groups: Mapping[str, GroupSettings]
    data: OpenedData
    seed: int

    @property
    def split(self) -> Split:
        """The split that it is drawn from."""
        return self.data.split(self.settings.source, self.settings.split)

    @cached_property
    def items(self) -> Int64[Tensor, " k"]:
        """Its items, in split order.

        Raises:
            ConfigError: there are fewer than it should have.
        """
        eligible = self._eligible()
        count = len(eligible) if self.settings.items is None else self.settings.items
        if count > len(eligible):
            left = " left by public.without" if self.settings.without else ""
            raise ConfigError(
                f"public.items is {count}, but '{self.settings.source}' has {len(eligible)}{left}; lower it"
            )
        order = torch.randperm(len(eligible), generator=generator(self.seed, "public"))
        return eligible[order[:count]].sort().values

    def samples(self, views: Views) -> Samples:
        """Its samples in a participant's own views, of the modalities that the split has.

        All columns of the split shape them, so that every participant counts the same samples.
        """
        split = self.split
        views = {name: view for name, view in views.items() if name in split.columns}
        return self._thinned(of_items(self.data.samples(split, views, layout=tuple(split.columns)), self.items))

    @cached_property
    def order(self) -> str:
        """Digest of its content and its order."""
        return order_of(self.samples({}), content_digests(self.split, self.items, self.data.context))

    def columns(self) -> dict[str, Column]:
        """Modality -> its part of the column."""
        split = self.split
        return {name: of_column(split.modality(name), self.items) for name in split.columns}

    def _eligible(self) -> Int64[Tensor, " n"]:
        """Items whose texts have none of the words of ``without``."""
        split = self.split
        kept = torch.ones(len(split), dtype=torch.bool)
        for name, entries in self.settings.without.items():
            if name not in split.columns:
                raise ConfigError(f"public.without: '{split.source}' has no '{name}'; {nearest(name, split.columns)}")
            words = [word for entry in entries for word in self._words(entry)]
            kept &= ~mentioning(split.modality(name), words)
        return kept.nonzero().squeeze(1)

    def _words(self, entry: str) -> tuple[str, ...]:
        """An entry of ``without``: a word, or the class names of an ``@source``."""
        if not entry.startswith("@"):
            return (entry,)
        source = entry.removeprefix("@")
        splits = [group.split for group in self.groups.values() if group.source == source]
        classes = self.data.split(source, splits[0] if splits else "train").classes
        names = tuple(name for of_target in classes.values() for name in of_target)
        if not names:
            raise ConfigError(f"public.without: source '{source}' has no names of classes; list the words themselves")
        return names

    def _thinned(self, samples: Samples) -> Samples:
        """At most ``per_item`` samples of each item, drawn at random; in sample order."""
        if self.settings.per_item is None:
            return samples
        keys = torch.rand(len(samples), generator=generator(self.seed, "public-samples"))
        order = torch.argsort(keys, stable=True)
        order = order[torch.argsort(samples.items[order], stable=True)]
        items = samples.items[order]
        first = torch.searchsorted(items, items)  # position of the first sample of the same item
        chosen = order[torch.arange(len(items)) - first < self.settings.per_item]
        return samples.subset(chosen.sort().values)
