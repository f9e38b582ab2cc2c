"""Templates of pages and reports: all text is escaped, unless it is markup already."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polyfed.core.untrusted import markdown

if TYPE_CHECKING:
    from jinja2 import Environment

# control characters are invalid in HTML, and those that change the direction of writing can disguise a name
_CONTROLS = [*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_UNSAFE = dict.fromkeys(_CONTROLS, "\ufffd")


class GalleryEntry(NamedTuple):
    """A query or a retrieval: an image and a sound as data URIs, or a text, and whether it is right.

    ``late`` is the rank of a right entry that is not among the first, 0 for all others.
    """

    image: str
    text: str
    similarity: float | None = 1.0
    right: bool = False
    sound: str = ""
    late: int = 0


def html_templates() -> Environment:
    """Templates of HTML; Jinja2 escapes every plain text, also in quoted attributes."""
    return _environment(html=True)


def markdown_templates(folder: Path | None = None) -> Environment:
    """Templates of Markdown, polyfed's or a folder's; every plain text becomes one escaped line."""
    return _environment(html=False, folder=folder)


def resource(name: str) -> str:
    return resources.files("polyfed.reporting").joinpath("templates", name).read_text("utf-8")


@functools.cache
def _environment(*, html: bool, folder: Path | None = None) -> Environment:
    from jinja2 import Environment, FileSystemLoader, PackageLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(folder) if folder else PackageLoader("polyfed.reporting"),
        autoescape=html,
        finalize=_html if html else _markdown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # a rendered text file ends with a line break too
        keep_trailing_newline=True,
    )


def printable(text: str) -> str:
    """The text without characters that are invalid in HTML or disguise a name."""
    # a lone surrogate cannot be written as UTF-8 and would end the report
    return text.translate(_UNSAFE).encode("utf-8", "replace").decode()


def _html(value: Any) -> Any:
    """A value that a template writes; Jinja2 escapes it after this."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _markdown(value: Any) -> Any:
    return value if hasattr(value, "__html__") else markdown(str(value))
