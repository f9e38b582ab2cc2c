"""Tables of delimited fields, read strictly: every row as its writer meant it, or an error that names the line."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from polyfed.core.errors import DataError
from polyfed.data.text_files import MOST_BYTES

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
    lines = io.StringIO(text, newline="").readlines()
    start = 1 if lines and (told := _SEPARATOR.fullmatch(lines[0])) else 0
    while start < len(lines) and not lines[start].strip():
        start += 1
    if start == len(lines):
        raise DataError("has no rows")
    delimiter = told[1] if told else _delimiter("".join(lines[start:]))
    records = _meant(lines, start, delimiter)
    return _columns(records, delimiter)


def _delimiter(text: str) -> str:
    """What the heading is divided by, and where that leaves it open, the next line."""
    match = _HEADING.match(text)
    heading = match[0] if match else ""
    after = text[len(heading) :].lstrip().partition("\n")[0]
    return max(_DELIMITERS, key=lambda one: (_QUOTED.sub("", heading).count(one), _QUOTED.sub("", after).count(one)))


def _meant(lines: Sequence[str], start: int, delimiter: str) -> list[_Record]:
    """The records of lines; a space after a delimiter is no content where the heading, or a quote, has one there."""
    records = _records(lines, start, delimiter)
    heading = records[0].fields
    if len(heading) > 1 and all(name.startswith(" ") for name in heading[1:]):
        records = _records(lines, start, delimiter, skipinitialspace=True)
    elif any(f"{delimiter} " in line and '"' in line for line in lines):
        spaced = _records(lines, start, delimiter, skipinitialspace=True)
        if [_stripped(one) for one in spaced] != [_stripped(one) for one in records]:
            records = spaced
    long = next((one for one in records if one.last > one.first), None)
    if long and len(heading) > 1:
        plain = _records(lines, start, delimiter, quoting=csv.QUOTE_NONE)
        if all(len(one.fields) == len(heading) for one in plain if one.fields):
            raise DataError(
                f"lines {long.first} to {long.last} are one row if quotes hold texts together, and a row each if they "
                "do not; write quotes in texts twice, or save the table as JSON lines"
            )
    ends = {lines[one.last - 1].endswith("\n") for one in records if lines[one.last - 1][-1] in "\r\n"}
    if len(ends) > 1:
        odd = next(one for one in records if lines[one.last - 1].endswith("\r"))
        raise DataError(f"line {odd.last} ends in a carriage return, others in line feeds; write one end of lines")
    return records


def _stripped(record: _Record) -> list[str]:
    return [field.lstrip() for field in record.fields]


def _records(lines: Sequence[str], start: int, delimiter: str, **form: Any) -> list[_Record]:
    limit = csv.field_size_limit(min(MOST_BYTES, (1 << 31) - 1))
    reader = csv.reader(lines[start:], delimiter=delimiter, strict=True, **form)
    records, first = [], start + 1
    try:
        for fields in reader:
            records.append(_Record(fields, first, start + reader.line_num))
            first = start + reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"line {first}: a text that begins with a quote does not end with one ({error}); put the whole text in "
            "quotes, and write those within it twice"
        ) from error
    finally:
        csv.field_size_limit(limit)
    return records


def _columns(records: Sequence[_Record], delimiter: str) -> Rows:
    heading, *rows = records
    names = [name.strip() for name in heading.fields]
    if names[0].startswith("# "):
        raise DataError(f"line {heading.first} is a comment, not a heading ('{names[0][:40]}'); remove it")
    rows = [row for row in rows if row.fields and (row.fields != [""] or len(names) == 1)]
    named = max((place for place, name in enumerate(names, 1) if name), default=0)
    widest = {len(row.fields) for row in rows}
    if len(widest) == 1 < len(names) and not any("".join(row.fields[len(names) :]) for row in rows):
        names += [""] * (max(widest) - len(names))  # a delimiter at the end of each row
    for row in rows:
        if len(row.fields) not in (len(names), named):
            raise _of_another_length(row, heading, delimiter)
    twice = next((name for name, count in Counter(filter(None, names)).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"line {heading.first} names two columns '{twice}'; rename one of them")
    columns = {}
    for place, name in enumerate(names):
        values = [row.fields[place] or None if place < len(row.fields) else None for row in rows]
        if name or any(values):
            columns[name or f"Unnamed: {place}"] = values
        if not name and place and any(values):
            row = next(row for row, value in zip(rows, values, strict=True) if value)
            raise DataError(
                f"line {row.first} has '{row.fields[place][:40]}' where the heading names no column; name it, or quote "
                f"texts that hold '{delimiter}'"
            )
    return columns


def _of_another_length(row: _Record, heading: _Record, delimiter: str) -> DataError:
    more = f"quote texts that hold '{delimiter}', and remove lines above the heading"
    remedy = more if len(row.fields) > len(heading.fields) else "write empty fields too"
    return DataError(
        f"line {row.first} has {len(row.fields)} fields, the heading (line {heading.first}) {len(heading.fields)}; "
        f"{remedy}"
    )
