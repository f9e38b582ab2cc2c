"""Who of a group holds which items, and who is tested on which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.data.assembly import matched_items
from polyfed.data.item_classes import Indices, ItemClasses, item_classes, item_groups
from polyfed.data.source import Split
from polyfed.federation.settings import GroupSettings
from polyfed.partitions.units import dealt, grouped

LEAST_DEALT = 2
"""Test items that every client gets where they are dealt out: fewer make neither a ranking nor a batch."""


@dataclass(frozen=True)
class Assignment:
    """How the items of one group of clients are dealt out.

    Attributes:
        name: of the group.
        group: its settings.
        seed: of the run.
        open: source and split -> the opened split.
        private: the items that are dealt out, in split order.
    """

    name: str
    group: GroupSettings
    seed: int
    open: Callable[[str, str], Split]
    private: Callable[[], Int64[Tensor, " n"]]

    @property
    def split(self) -> Split:
        return self.open(self.group.source, self.group.split)

    @property
    def test_split(self) -> Split:
        assert self.group.test_split is not None
        return self.open(self.group.source, self.group.test_split)

    @cached_property
    def classes(self) -> ItemClasses | None:
        """Classes of the split's items, as the partition sees them; None if they have none."""
        of_splits = item_classes([self.split], self.group.partition.of, self._key("of"))
        return None if of_splits is None else of_splits[0]

    @cached_property
    def parts(self) -> list[Int64[Tensor, " k"]]:
        own = self.private()
        labels = None if self.classes is None else self.classes.numbers[own]
        together = self._together(self.split)
        kept = None if together is None else together[own]
        stream = generator(self.seed, "partition", self.name)
        return [own[part] for part in self.group.partition.split(len(own), labels, self.group.count, stream, kept)]

    def test_items(self, client: int) -> Int64[Tensor, " k"]:
        """The test items of a client, by its place in the group, ascending."""
        if self.group.test == "dealt":
            items = self._dealt[client]
        else:
            # one order for the group, so that its clients are tested on the same items wherever they may be
            items = torch.randperm(len(self.test_split), generator=generator(self.seed, "test", self.name))
        if self.group.test == "matched":
            if self._both_classes is None:
                raise ConfigError(f"clients.{self.name}.test is matched, but '{self.group.source}' has no item labels")
            own, test = self._both_classes
            items = matched_items(items, test.numbers, own.numbers[self.parts[client]])
            if not len(items):
                raise ConfigError(
                    f"clients.{self.name}.test is matched, but split '{self.group.test_split}' lacks a class of client "
                    f"{client} (or nearly so), which leaves no items; use test: dealt, or all"
                )
        return items[: self.group.test_items].sort().values

    def counts(self, items: Int64[Tensor, " k"]) -> dict[str, object]:
        if self.classes is None:
            return {"labels": None}
        columns = self.classes.column_counts(items)
        return {"labels": self.classes.counts(items)} | ({"columns": columns} if columns else {})

    def test_counts(self, items: Int64[Tensor, " k"]) -> dict[str, object]:
        classes = None if self._both_classes is None else self._both_classes[1]
        columns = {} if classes is None else classes.column_counts(items)
        return {
            "split": self.group.test_split,
            "items": len(items),
            "labels": None if classes is None else classes.counts(items),
            "index": items.tolist(),
            **({"columns": columns} if columns else {}),
        }

    @cached_property
    def _dealt(self) -> list[Int64[Tensor, " n"]]:
        """Items of the test split for each client, in random order."""
        split, group, both = self.test_split, self.group, self._both_classes
        labels = torch.zeros(len(split), dtype=torch.int64) if both is None else both[1].numbers
        together = self._together(split)
        stays = torch.arange(len(split)) if together is None else together
        units, members = grouped(stays.numpy(), labels.numpy(force=True))
        if len(units) < group.count:
            raise ConfigError(
                f"clients.{self.name}.test is dealt, but '{split.source}' {split.name} has {len(units)} {units.called} "
                f"for {group.count} clients; lower count, or set test: all"
            )
        stream = generator(self.seed, "test", self.name)
        # numpy's generator, as that deals out the groups; seeded from the run's own stream
        rng = np.random.default_rng(int(torch.randint(2**63 - 1, (1,), generator=stream)))
        sizes = np.array([len(items) for items in self.parts], dtype=np.int64)
        parts = dealt(units, self._class_counts(), sizes, rng, LEAST_DEALT)
        given = [int(units.sizes[part].sum()) for part in parts]
        if min(given) < LEAST_DEALT:
            largest = f" (the largest group that stays together, '{group.partition.together}', has {units.sizes.max()})"
            raise ConfigError(
                f"clients.{self.name}.test is dealt, but of '{group.source}' {group.test_split} the clients would get "
                f"{given} items, and each needs {LEAST_DEALT}{'' if units.are_items else largest}; lower count, set "
                "test: all, or use more test items"
            )
        return [torch.from_numpy(rng.permutation(np.concatenate([members[unit] for unit in part]))) for part in parts]

    def _class_counts(self) -> dict[int, Indices]:
        """Class -> training items of it that each client holds, [clients]."""
        if self._both_classes is None:
            return {}
        own = self._both_classes[0].numbers
        labels = np.unique(own.numpy())
        counts = [np.array([int((own[items] == label).sum()) for items in self.parts]) for label in labels.tolist()]
        return dict(zip(labels.tolist(), counts, strict=True))

    @cached_property
    def _both_classes(self) -> list[ItemClasses] | None:
        return item_classes([self.split, self.test_split], self.group.partition.of, self._key("of"))

    def _together(self, split: Split) -> Int64[Tensor, " n"] | None:
        column = self.group.partition.together
        return None if column is None else item_groups(split, column, self._key("together"))

    def _key(self, setting: str) -> str:
        return f"clients.{self.name}.partition.{setting}"
