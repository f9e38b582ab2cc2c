"""What a group of clients holds besides the items of its own source: ``also`` in its settings."""

from __future__ import annotations

from polyfed.core.errors import ConfigError
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.data.union import union
from polyfed.federation.settings import GroupSettings, PublicSettings
from polyfed.tasks.task import Task


def additional_group(name: str, group: GroupSettings, public: PublicSettings | None) -> GroupSettings:
    """The group as if what it holds in addition were all that it holds.

    Raises:
        ConfigError: that is the public set, and there is none.
    """
    also = group.also
    assert also is not None
    source, split = also.source, also.split
    if also.public:
        if public is None:
            raise ConfigError(f"clients.{name}.also is public, but there is no public set; add a 'public' section")
        source, split = public.source, public.split
    dealt = {"source": source, "split": split, "items": also.items, "partition": also.partition}
    return group.model_copy(update=dealt)


def require_alike(name: str, group: GroupSettings, own: Split, also: Split) -> None:
    """Check that one model and one task fit both splits that the clients of a group hold.

    Raises:
        ConfigError: a modality is missing in the second, or the task's classes are not the same in both.
    """
    key = f"clients.{name}.also"
    missing = [modality for model in group.models for modality in model.encoders if modality not in also.columns]
    if missing:
        has = ", ".join(also.columns) or "none"
        raise ConfigError(f"{key}: '{also.source}' has no '{missing[0]}', which these clients encode; it has: {has}")
    target = _target(group.task)
    if target and own.source != also.source and not _have_equal_classes(target, own, also):
        raise ConfigError(
            f"{key}: classes of '{target}' in '{also.source}' are not those of '{own.source}', by their names, so one "
            "classifier cannot learn both; hold sources with the same classes"
        )


def _have_equal_classes(target: str, own: Split, also: Split) -> bool:
    """Whether both name the classes of the target, and alike: numbers without names may mean anything."""
    names = tuple(own.classes.get(target) or ())
    return target in also.targets and bool(names) and names == tuple(also.classes.get(target) or ())


def with_additional(own: Samples, also: Samples, task: Task) -> Samples:
    """The samples of both, with the targets that both have; those of other classes are left out.

    That the task's own classes are the same in both has been checked (``require_alike``).
    """
    differing = {
        name
        for name in own.classes.keys() & also.classes.keys()
        if tuple(own.classes[name]) != tuple(also.classes[name]) and name != _target(task)
    }
    return union([own.without_targets(differing), also.without_targets(differing)])


def _target(task: Task) -> str:
    return str(getattr(task, "target", ""))
