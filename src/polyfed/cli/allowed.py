"""The values that a setting takes, in words, read from its type and bounds."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from polyfed.core.settings import Component, Settings

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_PLAIN = {bool: "true | false", int: "whole number", float: "number", str: "text", Path: "path"}
_LISTS = (list, set, frozenset, Sequence, tuple)


def allowed_values(info: FieldInfo) -> str:
    """Values of a field, such as ``tiny | 18 | 50``, ``whole number >= 1`` or ``text | null``."""
    return _in_words(info.annotation, info.metadata)


def _in_words(kind: Any, metadata: Sequence[Any] = ()) -> str:
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        return _in_words(kind, [*metadata, *more])
    if kind is type(None):
        return "null"
    if kind in _PLAIN:
        return _PLAIN[kind] + _bounds(metadata)
    if isinstance(kind, type) and issubclass(kind, Component):
        names = kind.declared()
        is_choice = kind.family() is kind or names
        return " | ".join([*names, "import path of a class"]) if is_choice else kind.component_name()
    if isinstance(kind, type) and issubclass(kind, Settings):
        return f"section of {', '.join(kind.model_fields)}"
    return _generic_in_words(kind, metadata)


def _generic_in_words(kind: Any, metadata: Sequence[Any]) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " | ".join(map(_yaml, arguments))
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(_in_words(part, metadata) for part in arguments))
    if origin is tuple and Ellipsis not in arguments:
        return f"[{', '.join(map(_in_words, arguments))}]"
    parts = [f"({words})" if " | " in words else words for words in map(_in_words, arguments)]
    if origin in _LISTS:
        return f"list of {parts[0]}{_bounds(metadata)}"
    return f"mapping of {parts[0]} to {parts[1]}" if origin in (dict, Mapping) else "any"


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bounds(metadata: Sequence[Any]) -> str:
    bounds = [
        f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}"
        for item in metadata
        for name, sign in _SIGNS.items()
        if (bound := getattr(item, name, None)) is not None
    ]
    is_filled = any(getattr(item, "min_length", None) for item in metadata)
    return (f" {' and '.join(bounds)}" if bounds else "") + (", not empty" if is_filled else "")
