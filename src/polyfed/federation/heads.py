"""Names of tasks' heads: equal where the heads mean the same, whatever data set they are trained on."""

from __future__ import annotations

import hashlib
import json

from polyfed.data.source import Split
from polyfed.tasks.task import Task


def head_name(task: Task, split: Split, kept_apart: str = "") -> str:
    """Name of a task's head in ``Model.heads``, and of what it means in the name of an architecture.

    It says the task, those of its settings that shape the head (where they are not the defaults), and, for a task with
    classes, which classes these are: by their names, or, where they have none, by the source that numbers them.

    Args:
        task: whose head.
        split: data that the head is for.
        kept_apart: what the configuration calls the type, if it keeps it apart from others that are alike.
    """
    shaping = [_written(name, getattr(task, name)) for name in task.shaping_settings() if not _is_default(task, name)]
    target = str(getattr(task, "target", ""))
    what = "-".join([task.component_name(), *shaping])
    classes = [target, _classes_of(target, split)] if target else [""]
    return ":".join(map(_escaped, [what, *classes, *filter(None, [kept_apart])])).rstrip(":")


def class_space(head: str) -> str:
    """Which classes a head tells apart, by its name; empty for a task without classes."""
    return head.partition(":")[2]


def _escaped(part: str) -> str:
    """A part of a name without what separates parts (``:``) or names of modules (``.``); of two parts two names."""
    return part.replace("%", "%25").replace(".", "%2E").replace(":", "%3A")


def _classes_of(target: str, split: Split) -> str:
    """Number and digest of the names of the classes, or the source."""
    names = split.classes.get(target)
    if not names:
        return split.source
    return f"{len(names)}x{hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:8]}"


def _is_default(task: Task, name: str) -> bool:
    return bool(getattr(task, name) == type(task).model_fields[name].get_default(call_default_factory=True))


def _written(name: str, value: object) -> str:
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    if isinstance(value, str):
        return value
    listed = value if isinstance(value, tuple | list) else [value]
    return "_".join(map(str, [name, *listed]))
