"""Texts from elsewhere: JSON and YAML read within bounds, without running code, and words shown as plain words.

Whatever reads text of a client, a site or a server reads it with ``read_json``, and the JSON or YAML of a file that
from elsewhere with ``file_json`` or ``yaml_content``; settings in such a file are validated within ``code_of``;
whatever shows text of a client, a site or a data set, on a
terminal, in a log or in a file, passes it through ``plain``, ``lines`` or ``markdown``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from polyfed.core.errors import ConfigError, PayloadError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_T = TypeVar("_T")

TEXT_BYTES = 1 << 21
"""Largest text that is parsed unless a caller knows better, bytes."""

_DEPTH = 32  # the deepest honest JSON, a run's spec, has about ten levels
_BYTES_A_VALUE = 16  # one value for so many bytes: parsed, a value takes up to a hundred bytes whatever its text takes
_LARGEST = 1 << 63
_YAML_LENGTH = 1 << 22  # characters
_YAML_DEPTH = 50
_YAML_VALUES = 100_000  # values with every alias in place of what it stands for
_DIGITS = 20  # no number of 64 bits has more
# a text, or a sign of structure outside of texts; possessive: linear in whatever is sent
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{},:]', re.DOTALL)


def read_json(text: object, most: int = TEXT_BYTES) -> Any:
    """The JSON in a text, once its length, depth and number of values are known to be bearable.

    Args:
        text: Text that arrived.
        most: bytes that it may have, encoded as UTF-8.

    Raises:
        PayloadError: it is not JSON, or beyond the bounds, or a whole number in it has more than 64 bits.
    """
    if not isinstance(text, str):
        raise PayloadError(f"damaged message: {type(text).__name__} where text is expected")
    size = len(text.encode(errors="surrogatepass"))
    if size > most:
        raise PayloadError(f"text of {size:,} bytes, the limit is {most:,} (limits.text_bytes)")
    # this reads no further than to what is too much, and keeps nothing of what it has read
    bound = max(most // _BYTES_A_VALUE, 64)
    depth = values = texts = 0
    for token in _TOKEN.finditer(text):
        sign = text[token.start()]
        depth += (sign in "[{") - (sign in "]}")
        values += sign in "[{,:"
        texts += sign == '"'
        if depth < 0:
            raise PayloadError("damaged message: JSON with a closing bracket that nothing opened")
        if depth > _DEPTH:
            raise PayloadError(f"damaged message: JSON nested deeper than {_DEPTH} levels")
        if max(values, texts - 1) > bound:  # every text but the first of a JSON follows a sign that is counted
            raise PayloadError(f"damaged message: JSON of more than {bound:,} values")
    try:
        return json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"damaged message: {type(error).__name__}: {error}") from error


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS or not -_LARGEST <= int(digits) < _LARGEST:
        raise ValueError(f"the whole number {digits[:_DIGITS]}{'...' * (len(digits) > _DIGITS)} is beyond 64 bits")
    return int(digits)


def file_json(text: str | bytes) -> Any:
    """The JSON in a file from elsewhere, which may be as long as its file.

    Raises:
        ValueError: it is not JSON, or nested deeper than Python reads, or a whole number in it has more than 64 bits.
    """
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def typed(expected: type[_T], content: object) -> _T:
    """An instance of a dataclass with values of the types that it declares; it may hold more than the class knows.

    Raises:
        ValueError: a value is missing or of another type; in one line, with its name.
    """
    from pydantic import ValidationError  # takes a tenth of a second

    try:
        made: _T = _adapter(expected).validate_python(content)  # type: ignore[arg-type]
        return made
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, problem['loc'])) or 'all of it'}: {problem['msg']}") from error


@cache
def _adapter(expected: type[_T]) -> TypeAdapter[_T]:
    from pydantic import TypeAdapter

    return TypeAdapter(expected)


def yaml_content(text: str) -> Any:
    """The values of a YAML text.

    Raises:
        ValueError: it is not YAML, names types that are not plain values, or would grow beyond bounds; in one line.
    """
    if len(text) > _YAML_LENGTH:
        raise ValueError(f"{len(text):,} characters, the limit is {_YAML_LENGTH:,}")
    try:
        _require_bounded(text)
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, AttributeError) as error:
        raise ValueError(" ".join(str(error).split())) from error


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # in C where there is one
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((key for number, key in enumerate(keys) if key in keys[:number]), None):
            place = f"the mapping of line {node.start_mark.line + 1}"
            raise ValueError(f"key '{twice[1]}' stands twice in {place}; the first would be lost")
        return super().construct_mapping(node, deep)


def _require_bounded(text: str) -> None:
    """Count values before any is made: an alias costs what it stands for, and never stands for itself."""
    sizes: dict[str | None, int] = {}  # of what each anchor names
    within: list[tuple[str | None, int]] = [(None, 0)]  # anchor and values so far of what is open
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            within.append((event.anchor, 1))
            if len(within) > _YAML_DEPTH:
                raise ValueError(f"nested deeper than {_YAML_DEPTH} levels")
            continue
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in within):
                raise ValueError("an alias stands for what it is part of")
            size = sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
            anchor, size = within.pop() if isinstance(event, yaml.CollectionEndEvent) else (event.anchor, 1)
            sizes[anchor] = size
        else:
            continue
        around, values = within.pop()
        if values + size > _YAML_VALUES:
            raise ValueError(f"more than {_YAML_VALUES:,} values, with aliases in place of what they stand for")
        within.append((around, values + size))


# ---- code

_handed_over: ContextVar[Path | None] = ContextVar("handed_over", default=None)


@contextlib.contextmanager
def code_of(folder: Path, allow: bool) -> Iterator[None]:
    """While settings of a folder are read, no module that they name is imported unless ``allow``.

    A class that this process has imported already needs no leave: naming it runs nothing.

    Raises:
        ConfigError: the folder names another class by its import path.
    """
    token = _handed_over.set(None if allow else folder)
    try:
        yield
    finally:
        _handed_over.reset(token)


def require_own_code(module: str, name: str) -> None:
    """Raise ConfigError if a folder that is being read names a class, and may not have it imported."""
    folder = _handed_over.get()
    if folder is not None and name not in getattr(sys.modules.get(module), "__dict__", {}):
        raise ConfigError(
            f"'{folder}' names code, '{module}.{name}', which runs when it is imported; if you trust the author of the "
            "folder, pass allow_code=True (--allow-code)"
        )


# ---- shown

_INVISIBLE = (  # without a column of their own: fillers, joiners, signs of direction, annotations, tags
    *(0xAD, 0x61C, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFEFF, 0xFFA0),
    *range(0x180B, 0x1810),
    *range(0x200B, 0x2010),
    *range(0x2028, 0x202F),
    *range(0x2060, 0x2070),
    *range(0xFFF0, 0xFFFC),
    *range(0x1BCA0, 0x1BCA4),
    *range(0x1D173, 0x1D17B),
    *range(0xE0000, 0xE1000),
)
_HIDDEN = {  # characters that change how others are shown, or hide -> what stands for them, of one column each
    **{code: chr(0x2400 + code) for code in range(0x20)},
    0x7F: "\u2421",
    **dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000), *_INVISIBLE), "\ufffd"),
}
_HIDDEN_BUT_LINES = {code: shown for code, shown in _HIDDEN.items() if chr(code) != "\n"}
_MARKS = {ord(mark): f"\\{mark}" for mark in "\\|`[*~$"} | {ord("<"): "&lt;", ord("&"): "&amp;"}
_OUTER_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")  # one between letters or digits does not mark text
_ADDRESS = re.compile(r":(?=//)|(?<=www)\.|(?<=[\w.+-])@(?=[\w-]+\.)|(?<=mailto):|(?<=xmpp):", re.IGNORECASE)
_BLOCK = re.compile(r"^(\s*)(?:([#>]|[-+=](?=[-+=\s]))|(\d+)([.)])(?=\s))")  # begins a heading, a list, a quotation


def plain(text: str) -> str:
    return text.translate(_HIDDEN)


def lines(text: str, indent: str = "    ") -> str:
    """The text with its line breaks; every line after the first is indented, so that none passes for an entry."""
    return text.rstrip().translate(_HIDDEN_BUT_LINES).replace("\n", f"\n{indent}")


def markdown(text: str) -> str:
    """The text as one line of Markdown without markup, HTML, links or further cells: what would make some is escaped.

    Underscores within a word, as in ``macro_f1``, make no markup and stay as they are.
    """
    escaped = _OUTER_UNDERSCORE.sub(r"\\_", plain(text).translate(_MARKS))
    return _BLOCK.sub(_escaped_block, _ADDRESS.sub(r"\\\g<0>", escaped))


def _escaped_block(start: re.Match[str]) -> str:
    space, sign, number, end = start.groups()
    return f"{space}\\{sign}" if sign else f"{space}{number}\\{end}"


class PlainFormatter(logging.Formatter):
    """Formats records of a log that people read: a record of several lines is one entry."""

    def format(self, record: logging.LogRecord) -> str:
        return lines(super().format(record))


def log_plainly(level: int, form: str) -> None:
    """Send the log of this process to stderr, as ``logging.basicConfig`` does, with nothing but text in it."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
