"""Tables of delimited fields, read strictly: every row as its writer meant it, or an error that names the line."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from polyfed.core.errors import DataError

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
