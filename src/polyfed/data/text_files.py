"""Text files as people have them: whose bytes may be read, what encodes them, and what ends a line."""

from __future__ import annotations

import codecs
import os
import re
import stat
from pathlib import Path

from polyfed.core.errors import DataError

MOST_BYTES = 1 << 32
"""Largest text file that is read."""

# the longer marks first: that of UTF-16 begins that of UTF-32
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_LINE_END = re.compile(r"\r\n|\r|\n")


def regular_bytes(file: Path, folder: Path, most: int, setting: str = "") -> bytes:
    """The bytes of a regular file that is in a folder, also where links lead to it; ``setting`` is behind ``most``.

    Raises:
        ValueError: it is a pipe or a device, larger than ``most`` bytes, or outside of the folder.
        OSError: it cannot be read.
    """
    top, target = folder.resolve(), file.resolve()
    if not target.is_relative_to(top):
        raise ValueError(f"the path leaves the data set's folder '{folder}'")
    # not blocking: opening a pipe would wait for whoever writes into it
    descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("the path is not that of a regular file")
        if status.st_size > most:
            raise ValueError(f"a file of {status.st_size:,} bytes, the limit is {most:,}{setting and f' ({setting})'}")
        # not read(most): Python reserves what it is asked for
        data = stream.read(status.st_size + 1)
    if len(data) > status.st_size:
        raise ValueError(f"a file of {status.st_size:,} bytes that holds more, as one that is being written does")
    return data


def text_of(file: Path, folder: Path) -> str:
    """The text of a file in a folder, without a byte-order mark.

    Raises:
        DataError: it is no regular file of the folder, or not UTF-8; the message says what it looks like.
    """
    try:
        data = regular_bytes(file, folder, MOST_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"'{file}' cannot be read ({reason}); put a file of text there, or leave it out") from error
    try:
        if (other := _other_encoding(data)) is None:
            return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        other = "an encoding of one byte a letter, such as Windows-1252"
    raise DataError(f"'{file}' is not UTF-8 text, it looks like {other}; save it as UTF-8")


def _other_encoding(data: bytes) -> str | None:
    if mark := next((mark for mark in _MARKS if data.startswith(mark)), None):
        return _MARKS[mark]
    if b"\0" not in data:
        return None
    return "UTF-16 or UTF-32" if data[:1000].count(0) > len(data[:1000]) // 4 else "no text at all, or UTF-16"


def lines_of(text: str) -> list[str]:
    lines = _LINE_END.split(text)
    return lines if lines[-1] else lines[:-1]
