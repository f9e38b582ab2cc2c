"""Members of a federation: clients by group, the items that each holds, and those that it is tested on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.data.assembly import Indices, ItemClasses, item_classes, item_groups
from polyfed.data.samples import Samples, union
from polyfed.data.source import Split
from polyfed.data.view import Views
from polyfed.federation.data import sample_views
from polyfed.federation.settings import GroupSettings, Lacking
from polyfed.models.model import ModelSettings
from polyfed.partitions.partition import grouped, partitioned
from polyfed.tasks.task import Task

LEAST_DEALT = 2
"""Least test items of a client where they are dealt out: fewer make neither a ranking nor a batch."""


@dataclass(frozen=True)
class Assignment:
    """Items of one group of clients, as they are dealt out.

    Attributes:
        name: name of the group.
        group: settings of the group.
        seed: seed of the run.
        open: source and split -> the opened split.
        items: items that are dealt out, in split order.
        public: True if the items are those of the public set.
    """

    name: str
    group: GroupSettings
    seed: int
    open: Callable[[str, str], Split]
    items: Int64[Tensor, " n"]
    public: bool = False

    @property
    def split(self) -> Split:
        return self.open(self.group.source, self.group.split)

    @property
    def test_split(self) -> Split:
        assert self.group.test_split is not None
        return self.open(self.group.source, self.group.test_split)

    @cached_property
    def classes(self) -> ItemClasses | None:
        """Classes of the split's items, by the partition's settings; None if they have none."""
        of_splits = item_classes([self.split], self.group.partition.of, self._key("of"))
        return None if of_splits is None else of_splits[0]

    @cached_property
    def parts(self) -> list[Int64[Tensor, " k"]]:
        own = self.items
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
        return items[: self.group.test_items].sort().values

    def lacking(self, client: int, *, test: bool = False) -> Lacking:
        """Items of a client that lack a modality, by its place in the group; or of its test items.

        Where all clients are tested on the same items, these lack the same for all.
        """
        missing = self.group.missing
        if missing is None or (test and not missing.test):
            return {}
        items = self.test_items(client) if test else self.parts[client].sort().values
        whose = "all" if test and self.group.test == "all" else client
        stream = generator(self.seed, "missing", self.name, f"{'test ' if test else ''}{whose}")
        return missing.lacking(items, stream)

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
        parts = partitioned(units, self._class_counts(), sizes, rng, LEAST_DEALT)
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


@dataclass(frozen=True)
class ItemShare:
    """Items of one split that a client holds.

    Attributes:
        assignment: items of the group, from which these were dealt out.
        items: items of the client, in random order.
        lacking: modality -> items without it.
    """

    assignment: Assignment
    items: Int64[Tensor, " k"]
    lacking: Lacking

    @property
    def ids(self) -> list[str]:
        split = self.assignment.split
        return split.known_as([split.ids[item] for item in self.items.tolist()])


@dataclass(frozen=True)
class Member:
    """A client of the federation.

    Attributes:
        id: name of the client.
        group: name of its group.
        place: position of the client in the group.
        settings: settings of its group.
        model: settings of its own model.
        head: name of its head: clients with one task and the same classes share it, whatever their sources.
        holdings: items of the client; first of its own source, then of the public set or of a second source.
    """

    id: str
    group: str
    place: int
    settings: GroupSettings
    model: ModelSettings
    head: str
    holdings: tuple[ItemShare, ...]

    @property
    def items(self) -> Int64[Tensor, " k"]:
        """Items of its own source."""
        return self.holdings[0].items

    @property
    def test_items(self) -> Int64[Tensor, " k"]:
        return self.holdings[0].assignment.test_items(self.place)

    @property
    def views(self) -> Views:
        """Views of the modalities that its samples have."""
        return sample_views(self.model, self.settings.task)


def require_enough_items(name: str, group: GroupSettings, there: int) -> None:
    """Check that a group has as many items as it is to deal out, at least one for each client.

    Raises:
        ConfigError: there are fewer.
    """
    wanted = group.items if isinstance(group.items, int) else there
    if wanted > there:
        raise ConfigError(f"clients.{name}.items is {wanted}, but '{group.source}' has {there} to deal out; lower it")
    if missing := max(0, group.count - wanted):
        are = f"are {wanted} samples" if wanted != 1 else "is 1 sample"
        raise ConfigError(
            f"clients.{name.removesuffix('.also')}.count is {group.count}, but there {are} of '{group.source}' to deal "
            f"out, without public, validation and test ones, and each takes one; lower it, or give {missing} more"
        )


def member_ids(group: str, count: int) -> list[str]:
    """Names of a group's clients; a group of one gives its client the group's name."""
    # zeros in front, so that files sort as clients do
    width = len(str(count - 1))
    return [group] if count == 1 else [f"{group}-{k:0{width}d}" for k in range(count)]


# ---- what clients hold in addition to the items of their own source: ``also`` in the settings of a group


def require_alike(name: str, group: GroupSettings, own: Split, also: Split) -> None:
    """Check that one model and one task fit both splits that the clients of a group hold."""
    key = f"clients.{name}.also"
    encoded = {name: None for model in group.models for name in model.encoders}
    missing = [name for name in encoded if name not in also.columns.keys() | group.task.own_modalities]
    if missing:
        has = ", ".join(also.columns) or "none"
        raise ConfigError(f"{key}: '{also.source}' has no '{missing[0]}', which these clients encode; it has: {has}")
    for target in group.task.class_targets:
        if own.source != also.source and not _have_equal_classes(target, own, also):
            what = f"{key}: classes of '{target}' in '{also.source}' are not those of '{own.source}', by their names"
            raise ConfigError(f"{what}, so one classifier cannot learn both; hold sources with the same classes")


def _have_equal_classes(target: str, own: Split, also: Split) -> bool:
    names = tuple(own.classes.get(target) or ())
    return target in also.targets and bool(names) and names == tuple(also.classes.get(target) or ())


def joined(sets: Sequence[Samples], task: Task) -> Samples:
    """The samples of all sets, with the targets that all have; those of other classes are left out.

    That the task's own classes are the same in all has been checked when the items were dealt out.
    """
    if len(sets) == 1:
        return sets[0]
    named = [{name: tuple(names) for name, names in one.classes.items()} for one in sets]
    shared = set.intersection(*map(set, named)) - set(task.class_targets)
    differing = {name for name in shared if len({own[name] for own in named}) > 1}
    return union([one.without_targets(differing) for one in sets])
