"""Files as people have them: whose bytes may be read, how texts are encoded, and tables of delimited fields.

Tables are read strictly: every row as its writer meant it, or an error that names the line.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

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


Rows = dict[str, list[Any]]
"""Name of a column -> its values, None where there is none; all columns have as many."""

DELIMITED = (".csv", ".tsv")

_DELIMITERS = "\t;|,"  # of two that are equally likely the first: names have commas rather than tabs
_SEPARATOR = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # a first line that Excel writes and reads
_QUOTED = re.compile(r'"[^"]*"')
_HEADING = re.compile(r'(?:"[^"]*"|[^"\r\n])*')


class _Record(NamedTuple):
    """Fields, and the first and last line that they stand on."""

    fields: list[str]
    first: int
    last: int


def delimited_rows(text: str) -> Rows:
    """The columns of a table with a heading; an empty field is None.

    Raises:
        DataError: a row does not have the heading's fields, or quotes leave open what they mean; without the file.
    """
    # a carriage return among line feeds ends no line, and csv refuses it outside of quotes
    lines = io.StringIO(text, newline="\n" if "\n" in text else "").readlines()
    told = _SEPARATOR.fullmatch(lines[0]) if lines else None
    start = next((number for number, line in enumerate(lines) if number >= bool(told) and line.strip()), None)
    if start is None:
        raise DataError("has no rows")
    delimiter = told[1] if told else _delimiter("".join(lines[start:]))
    return _columns(_meant(lines, start, delimiter), delimiter)


def _delimiter(text: str) -> str:
    """What the heading is divided by, and where that leaves it open, the next line."""
    heading = _HEADING.match(text)[0]  # type: ignore[index]  # it matches everything
    after = text[len(heading) :].lstrip().partition("\n")[0]
    return max(_DELIMITERS, key=lambda one: (_QUOTED.sub("", heading).count(one), _QUOTED.sub("", after).count(one)))


def _meant(lines: Sequence[str], start: int, delimiter: str) -> list[_Record]:
    """The records of lines; a space after a delimiter is no content where the heading, or a quote, has one there."""
    records, spaced = (_records(lines, start, delimiter, skipinitialspace=skips) for skips in (False, True))
    heading = records[0].fields
    pairs = zip(records, spaced, strict=False)
    by_hand = any(list(map(str.lstrip, one.fields)) != list(map(str.lstrip, other.fields)) for one, other in pairs)
    if by_hand or (len(heading) > 1 and all(name.startswith(" ") for name in heading[1:])):
        records = spaced
    long = next((one for one in records if one.last > one.first), None)
    if long and len(heading) > 1:
        plain = _records(lines, start, delimiter, quoting=csv.QUOTE_NONE)
        if all(len(one.fields) == len(heading) for one in plain if one.fields):
            where = f"lines {long.first} to {long.last}"
            raise DataError(f"{where} are one row or, if quotes are letters, several; write quotes in texts twice")
    return records


def _records(lines: Sequence[str], start: int, delimiter: str, **form: Any) -> list[_Record]:
    csv.field_size_limit((1 << 31) - 1)
    reader = csv.reader(lines[start:], delimiter=delimiter, strict=True, **form)
    records, first = [], start + 1
    try:
        for fields in reader:
            records.append(_Record(fields, first, start + reader.line_num))
            first = start + reader.line_num + 1
    except csv.Error as error:
        remedy = "put a text that begins with a quote in quotes, and write those within it twice"
        raise DataError(f"line {first}: quotes or ends of lines are odd ({error}); {remedy}") from error
    return records


def _columns(records: Sequence[_Record], delimiter: str) -> Rows:
    heading, *rows = records
    names = [name.strip() for name in heading.fields]
    rows = [row for row in rows if row.fields and (row.fields != [""] or len(names) == 1)]
    widths = {len(row.fields) for row in rows}
    if len(widths) == 1 < len(names) and not any("".join(row.fields[len(names) :]) for row in rows):
        names += [""] * (max(widths) - len(names))  # a delimiter at the end of each row
    if names[0].startswith("# "):
        raise DataError(f"line {heading.first} is a comment, not a heading ('{names[0][:40]}'); remove it")
    if twice := [name for name, count in Counter(names).items() if name and count > 1]:
        raise DataError(f"line {heading.first} names two columns '{twice[0]}'; rename one of them")
    named = max((place for place, name in enumerate(names, 1) if name), default=0)
    for row in rows:
        # the first column may lack a name: that of an index which pandas wrote
        nameless = any(field and not name for name, field in zip(names[1:], row.fields[1:], strict=False))
        if nameless or len(row.fields) not in (len(names), named):
            counts = f"line {row.first} has {len(row.fields)} fields, the heading (line {heading.first}) {named}"
            raise DataError(f"{counts}; quote texts that hold '{delimiter}', and leave nothing above the heading")
    columns = list(zip_longest(*(row.fields for row in rows))) or [()] * len(names)
    named_columns = zip(names, columns, strict=False)
    return {
        name or "Unnamed: 0": [value or None for value in column]
        for name, column in named_columns
        if name or any(column)
    }
