"""Who of a group holds which items, and who is tested on which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from polyfed.partitions.units import Units, dealt, grouped

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
        """The split that is dealt out."""
        return self.open(self.group.source, self.group.split)

    @property
    def test_split(self) -> Split:
        """The split of the group's tests."""
        assert self.group.test_split is not None
        return self.open(self.group.source, self.group.test_split)

    @cached_property
    def classes(self) -> ItemClasses | None:
        """Classes of the split's items, as the partition sees them; None if they have none."""
        found = item_classes([self.split], self.group.partition.of, self._key("of"))
        return None if found is None else found[0]

    @cached_property
    def parts(self) -> list[Int64[Tensor, " k"]]:
        """The items of each client."""
        own = self.private()
        stream, partition = generator(self.seed, "partition", self.name), self.group.partition
        labels = None if self.classes is None else self.classes.numbers[own]
        together = self._together(self.split)
        kept = None if together is None else together[own]
        return [own[part] for part in partition.split(len(own), labels, self.group.count, stream, kept)]

    def test_items(self, client: int) -> Int64[Tensor, " k"]:
        """The test items of a client, by its place in the group, ascending."""
        if self.group.test == "dealt":
            return self._first(self._dealt[client])
        items = torch.randperm(len(self.test_split), generator=self._test_stream())
        if self.group.test == "matched":
            own, classes = self._classes_of_both
            items = matched_items(items, classes.numbers, own.numbers[self.parts[client]])
            if not len(items):
                raise ConfigError(
                    f"clients.{self.name}.test is matched, but split '{self.group.test_split}' lacks a class of client "
                    f"{client} (or nearly so), which leaves no items; use test: dealt, or all"
                )
        return self._first(items)

    def counts(self, items: Int64[Tensor, " k"]) -> dict[str, object]:
        """Items by class, and by value of each column that makes the class, for the run folder."""
        if self.classes is None:
            return {"labels": None}
        columns = self.classes.column_counts(items)
        return {"labels": self.classes.counts(items)} | ({"columns": columns} if columns else {})

    def test_counts(self, items: Int64[Tensor, " k"]) -> dict[str, object]:
        """Likewise of a client's dealt test items."""
        both = self._dealt_classes
        columns = {} if both is None else both[1].column_counts(items)
        found = {
            "split": self.group.test_split,
            "items": len(items),
            "labels": None if both is None else both[1].counts(items),
            "index": items.tolist(),
        }
        return found | ({"columns": columns} if columns else {})

    def _first(self, items: Int64[Tensor, " n"]) -> Int64[Tensor, " k"]:
        return items[: self.group.test_items].sort().values

    @cached_property
    def _dealt(self) -> list[Int64[Tensor, " n"]]:
        """Items of the test split for each client, in random order."""
        split, count = self.test_split, self.group.count
        units, members = self._test_units(split)
        if len(units) < count:
            raise ConfigError(
                f"clients.{self.name}.test is dealt, but '{split.source}' {split.name} has {len(units)} {units.called} "
                f"for {count} clients; lower count, or set test: all"
            )
        rng = np.random.default_rng(int(torch.randint(2**63 - 1, (1,), generator=self._test_stream())))
        sizes = np.array([len(items) for items in self.parts], dtype=np.int64)
        parts = dealt(units, self._held(), sizes, rng, LEAST_DEALT)
        self._require_enough(units, parts)
        return [torch.from_numpy(rng.permutation(np.concatenate([members[unit] for unit in part]))) for part in parts]

    def _require_enough(self, units: Units, parts: Sequence[Indices]) -> None:
        given = [int(units.sizes[part].sum()) for part in parts]
        if min(given) < LEAST_DEALT:
            column, largest = self.group.partition.together, int(units.sizes.max())
            raise ConfigError(
                f"clients.{self.name}.test is dealt, but of '{self.group.source}' {self.group.test_split} the clients "
                f"would get {given} items, and each needs {LEAST_DEALT}"
                + ("" if units.are_items else f" (the largest group that stays together, '{column}', has {largest})")
                + "; lower count, set test: all, or use more test items"
            )

    def _test_units(self, split: Split) -> tuple[Units, list[Indices]]:
        both, together = self._dealt_classes, self._together(split)
        labels = torch.zeros(len(split), dtype=torch.int64) if both is None else both[1].numbers
        groups = torch.arange(len(split)) if together is None else together
        return grouped(groups.numpy(), labels.numpy(force=True))

    def _held(self) -> Mapping[int, Indices]:
        """Class -> training items of it that each client holds."""
        if self._dealt_classes is None:
            return {}
        own = self._dealt_classes[0].numbers.numpy()
        found = {int(label): np.zeros(len(self.parts), dtype=np.int64) for label in np.unique(own)}
        for client, items in enumerate(self.parts):
            for label, count in zip(*np.unique(own[items.numpy()], return_counts=True), strict=True):
                found[int(label)][client] = count
        return found

    @cached_property
    def _dealt_classes(self) -> list[ItemClasses] | None:
        """Classes of training and test items, numbered alike."""
        return item_classes([self.split, self.test_split], self.group.partition.of, self._key("of"))

    @property
    def _classes_of_both(self) -> list[ItemClasses]:
        if self._dealt_classes is None:
            raise ConfigError(f"clients.{self.name}.test is matched, but '{self.group.source}' has no item labels")
        return self._dealt_classes

    def _together(self, split: Split) -> Int64[Tensor, " n"] | None:
        column = self.group.partition.together
        return None if column is None else item_groups(split, column, self._key("together"))

    def _test_stream(self) -> torch.Generator:
        return generator(self.seed, "test", self.name)

    def _key(self, setting: str) -> str:
        return f"clients.{self.name}.partition.{setting}"
