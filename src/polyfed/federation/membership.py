"""Who belongs to a federation: its clients by group, and which items each of them holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.data.union import union
from polyfed.federation.assignment import Assignment
from polyfed.federation.client import SERVER
from polyfed.federation.data import OpenedData, PublicSet
from polyfed.federation.settings import GroupSettings, PublicSettings
from polyfed.federation.types import head_name
from polyfed.models.model import ModelSettings
from polyfed.tasks.task import Task


@dataclass(frozen=True)
class Member:
    """A client of the federation.

    Attributes:
        id: its name.
        group: name of its group.
        settings: of its group.
        model: its own model settings.
        items: its private items.
        head: name of its head: clients with one task and the same classes share it, whatever their sources.
        also: items of the public set, or of a second source, that it holds in addition.
    """

    id: str
    group: str
    settings: GroupSettings
    model: ModelSettings
    items: Int64[Tensor, " k"]
    head: str
    also: Int64[Tensor, " j"] | None = None


@dataclass(frozen=True)
class Membership:
    """The groups of a federation and how their items are assigned to clients.

    Attributes:
        groups: settings of the groups by name, in client order.
        public: the public set, which nobody holds privately unless a group says so.
        data: opens the groups' splits.
        seed: of the run.
    """

    groups: Mapping[str, GroupSettings]
    public: PublicSet | None
    data: OpenedData
    seed: int

    @cached_property
    def members(self) -> dict[str, Member]:
        """All clients by id, in client order.

        Raises:
            ConfigError: two clients have one name, or one that the server has.
        """
        # 'a' with two clients and 'a-0' with one make two clients called 'a-0'
        everybody = [member for name in self.groups for member in self._members_of(name)]
        by_id = {member.id: member for member in everybody}
        if len(by_id) < len(everybody):
            twice = next(member.id for member in everybody if by_id[member.id] is not member)
            raise ConfigError(f"two clients are called '{twice}'; rename one of the groups under 'clients'")
        if SERVER in by_id:
            raise ConfigError(f"clients.{SERVER}: a client cannot be called '{SERVER}'; rename the group")
        return by_id

    @cached_property
    def assignments(self) -> dict[str, Assignment]:
        """Group -> how its items are assigned to its clients.

        Raises:
            ConfigError: a group should hold public items, and there is no public set of its split.
        """
        return {
            name: Assignment(name, group, self.seed, self.data.split, self._items_of(name, group))
            for name, group in self.groups.items()
        }

    @cached_property
    def also_assignments(self) -> dict[str, Assignment]:
        """Group -> how what it holds in addition is assigned, for groups that do.

        Raises:
            ConfigError: a group should hold public items, and there is no public set.
        """
        return {name: self._also_assignment(name, group) for name, group in self.groups.items() if group.also}

    def test_items(self, member: Member) -> Int64[Tensor, " k"]:
        ids = member_ids(member.group, member.settings.count)
        return self.assignments[member.group].test_items(ids.index(member.id))

    def _members_of(self, name: str) -> list[Member]:
        group, own = self.groups[name], self.assignments[name].parts
        also = self.also_assignments[name].parts if name in self.also_assignments else [None] * len(own)
        head = head_name(group.task, self.data.split(group.source, group.split), group.type)
        return [
            Member(member_id, name, group, group.models[k % len(group.models)], items, head, more)
            for k, (member_id, items, more) in enumerate(zip(member_ids(name, group.count), own, also, strict=True))
        ]

    def _also_assignment(self, name: str, group: GroupSettings) -> Assignment:
        key = f"{name}.also"
        second = _additional_group(name, group, None if self.public is None else self.public.settings)

        def items() -> Int64[Tensor, " n"]:
            own, also = (self.data.split(settings.source, settings.split) for settings in (group, second))
            _require_alike(name, group, own, also)
            if group.also is None or not group.also.public or self.public is None:
                return self._private_items(key, second)
            return self._drawn(key, second, self.public.items)

        return Assignment(key, second, self.seed, self.data.split, items)

    def _items_of(self, name: str, group: GroupSettings) -> Callable[[], Int64[Tensor, " n"]]:
        """Gives the items that a group deals out."""
        if group.items != "public":
            return partial(self._private_items, name, group)
        public = self.public
        if public is None or (group.source, group.split) != (public.settings.source, public.settings.split):
            lacking = f"the public set is not of '{group.source}' {group.split}" if public else "there is no public set"
            raise ConfigError(f"clients.{name}.items is public, but {lacking}; give a number, or leave it out")
        return lambda: self._drawn(name, group, public.items)

    def _private_items(self, name: str, group: GroupSettings) -> Int64[Tensor, " n"]:
        items = torch.arange(len(self.data.split(group.source, group.split)))
        if self.public is not None:
            settings = self.public.settings
            if (group.source, group.split) == (settings.source, settings.split):
                items = items[~torch.isin(items, self.public.all_items)]  # what everybody sees is nobody's own
        return self._drawn(name, group, items)

    def _drawn(self, name: str, group: GroupSettings, items: Int64[Tensor, " n"]) -> Int64[Tensor, " m"]:
        """As many of the items as the group's clients share, in split order."""
        if isinstance(group.items, int):
            if group.items > len(items):
                raise ConfigError(
                    f"clients.{name}.items is {group.items}, but '{group.source}' has {len(items)} that can be dealt "
                    "out; lower it"
                )
            order = torch.randperm(len(items), generator=generator(self.seed, "items", name))
            items = items[order[: group.items]].sort().values
        if group.count > len(items):
            count = f"clients.{name.removesuffix('.also')}.count is {group.count}"
            raise ConfigError(f"{count}, but there are {len(items)} samples of '{group.source}'; lower it")
        return items


def member_ids(group: str, count: int) -> list[str]:
    """Names of a group's clients; a group of one gives its client the group's name."""
    # zeros in front, so that files sort as clients do
    width = len(str(count - 1))
    return [group] if count == 1 else [f"{group}-{k:0{width}d}" for k in range(count)]


# ---- what clients hold in addition to the items of their own source: ``also`` in the settings of a group


def _additional_group(name: str, group: GroupSettings, public: PublicSettings | None) -> GroupSettings:
    """The group as if what it holds in addition were all that it holds."""
    also = group.also
    assert also is not None
    source, split = also.source, also.split
    if also.public:
        if public is None:
            raise ConfigError(f"clients.{name}.also is public, but there is no public set; add a 'public' section")
        source, split = public.source, public.split
    return group.model_copy(update={"source": source, "split": split, "items": also.items, "partition": also.partition})


def _require_alike(name: str, group: GroupSettings, own: Split, also: Split) -> None:
    """Check that one model and one task fit both splits that the clients of a group hold."""
    key = f"clients.{name}.also"
    missing = [modality for model in group.models for modality in model.encoders if modality not in also.columns]
    if missing:
        has = ", ".join(also.columns) or "none"
        raise ConfigError(f"{key}: '{also.source}' has no '{missing[0]}', which these clients encode; it has: {has}")
    for target in group.task.class_targets:
        if own.source != also.source and not _have_equal_classes(target, own, also):
            raise ConfigError(
                f"{key}: classes of '{target}' in '{also.source}' are not those of '{own.source}', by their names, so "
                "one classifier cannot learn both; hold sources with the same classes"
            )


def _have_equal_classes(target: str, own: Split, also: Split) -> bool:
    names = tuple(own.classes.get(target) or ())
    return target in also.targets and bool(names) and names == tuple(also.classes.get(target) or ())


def with_additional(own: Samples, also: Samples, task: Task) -> Samples:
    """The samples of both, with the targets that both have; those of other classes are left out.

    That the task's own classes are the same in both has been checked when the items were dealt out.
    """
    differing = {
        name
        for name in own.classes.keys() & also.classes.keys()
        if tuple(own.classes[name]) != tuple(also.classes[name]) and name not in task.class_targets
    }
    return union([own.without_targets(differing), also.without_targets(differing)])
