"""Which values a setting takes, in words, read from its type and bounds: nobody writes them down twice."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from polyfed.core.settings import Component, Settings

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_PLAIN = {bool: "true | false", int: "whole number", float: "number", str: "text", Path: "path", type(None): "null"}


def allowed_values(info: FieldInfo) -> str:
    """Values of a field, such as ``tiny | 18 | 50``, ``whole number >= 1`` or ``text | null``."""
    return _in_words(info.annotation, info.metadata)


def _in_words(kind: Any, metadata: Sequence[Any] = ()) -> str:
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        return _in_words(kind, [*metadata, *more])
    if kind in _PLAIN:
        return _PLAIN[kind] + (_bounds(metadata) if kind in (int, float) else _size(metadata))
    if isinstance(kind, type) and issubclass(kind, Component):
        return _of_component(kind)
    if isinstance(kind, type) and issubclass(kind, Settings):
        return f"section of {', '.join(kind.model_fields)}"
    return _of_generic(kind, metadata)


def _of_generic(kind: Any, metadata: Sequence[Any]) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " | ".join(_literal(value) for value in arguments)
    if origin in (Union, types.UnionType):
        words = (_in_words(part, () if part is type(None) else metadata) for part in arguments)
        return " | ".join(dict.fromkeys(words))
    if origin in (list, set, frozenset, Sequence):
        return f"list of {_grouped(_in_words(arguments[0]))}{_size(metadata)}"
    if origin is tuple:
        return _of_tuple(arguments)
    if origin in (dict, Mapping):
        return f"mapping of {_grouped(_in_words(arguments[0]))} to {_grouped(_in_words(arguments[1]))}"
    return "any"


def _of_tuple(arguments: Sequence[Any]) -> str:
    if arguments[-1:] == (Ellipsis,):
        return f"list of {_grouped(_in_words(arguments[0]))}"
    return f"[{', '.join(_in_words(part) for part in arguments)}]"


def _of_component(kind: type[Component]) -> str:
    names = kind.declared()
    return " | ".join([*names, "import path of a class"]) if kind.family() is kind or names else kind.component_name()


def _literal(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bounds(metadata: Sequence[Any]) -> str:
    parts = [
        f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}"
        for item in metadata
        for name, sign in _SIGNS.items()
        if (bound := getattr(item, name, None)) is not None
    ]
    return f" {' and '.join(parts)}" if parts else ""


def _size(metadata: Sequence[Any]) -> str:
    least = [item.min_length for item in metadata if getattr(item, "min_length", None)]
    return ", not empty" if least else ""


def _grouped(words: str) -> str:
    return f"({words})" if " | " in words else words
