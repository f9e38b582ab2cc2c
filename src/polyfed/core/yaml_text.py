"""YAML that somebody handed over, read as plain values within bounds; whatever is wrong with it is one line."""

from __future__ import annotations

from typing import Any

import yaml

_LENGTH = 1 << 22  # characters
_DEPTH = 50
_VALUES = 100_000  # values with every alias in place of what it stands for


def yaml_content(text: str) -> Any:
    """The values of a YAML text.

    Raises:
        ValueError: it is not YAML, names types that are not plain values, or would grow beyond bounds; in one line.
    """
    if len(text) > _LENGTH:
        raise ValueError(f"{len(text):,} characters, the limit is {_LENGTH:,}")
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, AttributeError) as error:
        raise ValueError(" ".join(str(error).split())) from error


class _Loader(yaml.SafeLoader):
    """Counts values while they are composed: an alias costs what it stands for, and never stands for itself."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open = [0]  # values so far in each node that is being composed
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node and all below it."""
        if len(self._open) > _DEPTH:
            raise ValueError(f"nested deeper than {_DEPTH} levels")
        if self.check_event(yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                raise ValueError("an alias stands for what it is part of")
            size = self._sizes[id(node)]
        else:
            self._open.append(1)
            node = super().compose_node(parent, index)
            size = self._sizes[id(node)] = self._open.pop()
        self._open[-1] += size
        if self._open[-1] > _VALUES:
            raise ValueError(f"more than {_VALUES:,} values, with aliases in place of what they stand for")
        return node
