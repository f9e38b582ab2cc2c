"""Text that somebody else wrote: JSON read within bounds, and words shown so that they are nothing but words.

Whatever reads text of a client, a site or a server reads it with ``read_json``; whatever shows text of a client, a
site or a data set, on a terminal, in a log or in a file, passes it through ``plain``, ``lines`` or ``markdown``.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from polyfed.errors import PayloadError

TEXT_BYTES = 1 << 21
"""Largest text that is parsed unless a caller knows better, bytes."""

_DEPTH = 32  # the deepest honest JSON, a run's card, has about ten levels
_BYTES_A_VALUE = 16  # one value for so many bytes: parsed, a value takes up to a hundred bytes whatever its text takes
_LARGEST = 1 << 63
_DIGITS = 20  # no number of 64 bits has more
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # possessive: linear in whatever is sent
_BRACKET = re.compile(r"[\[\]{}]")


def read_json(text: object, most: int = TEXT_BYTES) -> Any:
    """The JSON in a text, once its length, depth and number of values are known to be bearable.

    Args:
        text: what arrived.
        most: bytes that it may have, encoded as UTF-8.

    Raises:
        PayloadError: it is no JSON or beyond the bounds, or a whole number in it has more than 64 bits.
    """
    if not isinstance(text, str):
        raise PayloadError(f"damaged message: {type(text).__name__} where text is expected")
    size = len(text.encode(errors="surrogatepass"))
    if size > most:
        raise PayloadError(f"text of {size:,} bytes, the limit is {most:,} (limits.text_bytes)")
    _require_bearable(text, most)
    try:
        return json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"damaged message: {type(error).__name__}: {error}") from error


def _require_bearable(text: str, most: int) -> None:
    structure = _STRING.sub("", text)
    values = sum(map(structure.count, "[{,:"))
    if values > max(most // _BYTES_A_VALUE, 64):
        raise PayloadError(f"damaged message: JSON of more than {most // _BYTES_A_VALUE:,} values")
    depth = 0
    for bracket in _BRACKET.findall(structure):
        depth += 1 if bracket in "[{" else -1
        if depth > _DEPTH:
            raise PayloadError(f"damaged message: JSON nested deeper than {_DEPTH} levels")


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS or not -_LARGEST <= int(digits) < _LARGEST:
        raise ValueError(f"the whole number {digits[:_DIGITS]}{'...' * (len(digits) > _DIGITS)} is beyond 64 bits")
    return int(digits)


# ---- shown

_HIDDEN = {  # characters that change how others are shown -> what stands for them, of one column each
    **{code: chr(0x2400 + code) for code in range(0x20)},
    0x7F: "\u2421",
    **dict.fromkeys((*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F, 0x2028, 0x2029), "\ufffd"),
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000), 0xFEFF), "\ufffd"),
}
_HIDDEN_BUT_LINES = {code: shown for code, shown in _HIDDEN.items() if chr(code) != "\n"}
_MARKS = {ord(mark): f"\\{mark}" for mark in "\\|`["} | {ord("<"): "&lt;", ord("&"): "&amp;"}


def plain(text: str) -> str:
    """The text as one line without effect on a terminal: a visible sign stands for each control character."""
    return text.translate(_HIDDEN)


def lines(text: str, indent: str = "    ") -> str:
    """The text with its line breaks; every line after the first is indented, so that none passes for an entry."""
    return text.rstrip().translate(_HIDDEN_BUT_LINES).replace("\n", f"\n{indent}")


def markdown(text: str) -> str:
    """The text as one line of Markdown without markup, HTML, links or further cells."""
    return plain(text).translate(_MARKS)


class PlainFormatter(logging.Formatter):
    """Formats records of a log that people read: a record of several lines is one entry."""

    def format(self, record: logging.LogRecord) -> str:
        """One entry."""
        return lines(super().format(record))


def log_plainly(level: int, form: str) -> None:
    """Send the log of this process to stderr, as ``logging.basicConfig`` does, with nothing but text in it."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
