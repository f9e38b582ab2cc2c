"""HTML that cannot be broken by what it shows: every plain text is escaped, only ``Markup`` is not."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias

_VOID = frozenset({"br", "img", "input", "meta"})
_REPLACEMENT = "\ufffd"
# control characters are no HTML, and those that turn the direction of writing can disguise a name
_CONTROLS = [*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_UNSAFE = dict.fromkeys(_CONTROLS, _REPLACEMENT)


class Markup(str):
    """A string that is HTML already."""

    __slots__ = ()


Child: TypeAlias = str | int | float | Iterable["Child"] | None
Attribute: TypeAlias = str | int | float | bool | None


def escaped(text: str) -> Markup:
    """Plain text as HTML, also safe within an attribute in quotes."""
    return Markup(html.escape(text.translate(_UNSAFE).encode("utf-8", "replace").decode()))


def render(child: Child) -> Markup:
    """``Markup`` as it is, text escaped, parts of a sequence one after another, None as nothing."""
    if child is None:
        return Markup()
    if isinstance(child, Markup):
        return child
    if isinstance(child, str | int | float):
        return escaped(str(child))
    return Markup("".join(map(render, child)))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """An element.

    Args:
        name: such as ``td``.
        children: its content.
        attributes: ``class_`` and ``data_x`` stand for ``class`` and ``data-x``; True is an attribute without a
            value, None and False leave it out.
    """
    given = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{render(children)}</{name}>")


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escaped(str(value))}"'
