"""Dialects of text files: encoding, delimiter, decimal sign and marks of missing cells, detected from all of a file.

A dialect describes itself in one line. Ambiguous files are refused, with the setting that decides.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

from polyfed.core.errors import DataError

Rows = dict[str, list[Any]]
"""Name of a column -> its values, None where missing; all columns are equally long."""


@dataclass(frozen=True)
class Dialect:
    """Writing of a file, as far as it is known.

    Attributes:
        encoding: name of the encoding.
        delimiter: sign between fields; None: the file is not a delimited table.
        decimal: sign before decimals; None: no number has any.
        rows: number of rows.
        sample: a word that shows the encoding, where it is guessed.
        missing: (column, mark) -> cells of a column of numbers with this mark for a missing value.
        mixed: column -> its first value other than a number, where at least half of its values are, or have a unit.
    """

    encoding: str
    delimiter: str | None = None
    decimal: str | None = None
    rows: int = 0
    sample: str = ""
    missing: Mapping[tuple[str, str], int] = field(default_factory=dict)
    mixed: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [self.encoding + (f" (as in '{self.sample}')" if self.sample else "")]
        if self.delimiter is not None:
            parts.append(f"{'tab' if self.delimiter == _TAB else repr(self.delimiter)} between fields")
        if self.decimal is not None:
            parts.append(f"'{self.decimal}' as decimal point")
        notes = [f"{', '.join(parts)}, {self.rows:,} row{'s' * (self.rows != 1)}"]
        notes += [f"{count} '{mark}' in '{name}' read as missing" for (name, mark), count in self.missing.items()]
        notes += [f"'{name}' is not a column of numbers, as it has '{value}'" for name, value in self.mixed.items()]
        return "; ".join(notes)


# ---- encodings

# longer marks first: the mark of UTF-32 begins with that of UTF-16
_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_SAVE = "save it as UTF-8, or name its encoding in reading.encoding or --encoding"

_ACCENTED = "àáâãäåæçèéêëìíîïñòóôõöøùúûüßœ"
_LETTER = f"[a-z{_ACCENTED}]"
_ODD = re.compile(
    # letters and signs of Windows-1252 that are rare in Western texts, and common in other encodings
    rf"[^ -~{_ACCENTED}€‚„…‘’“”•–—™‹›\xa0¡£§©ª«®°±²³´µº»½¿×]"
    # signs within, before and after words, and next to each other
    rf"|(?<={_LETTER})[€‚„“”•™‹›¡£§©ª«®°±²³µº»½¿×](?={_LETTER})|[²³ªº](?={_LETTER})|(?<={_LETTER})[¡¿]"
    rf"|(?<!{_LETTER})´|[âã][\xa0-\xbf€]|[€¡£§©ª®°±²³µº½¿×]{{2}}"
    # accented letters next to each other, and alone
    rf"|[{_ACCENTED}]{{3}}|(?![äöü]ß|[çñ]|é[éâçèêôû]|ü[áéí]|[åäöæø][åäöæø])[{_ACCENTED}]{{2}}"
    rf"|(?<!{_LETTER})[áâãäæçêëìíîïñòóôõøùúûüßœ](?![a-z{_ACCENTED}.])"
    # letters that languages have in some positions only, and other encodings anywhere
    rf"|à(?!s\b|quel)(?={_LETTER})|[ìòù](?={_LETTER})|ã(?![oeis])(?={_LETTER})|õ(?!e)|ñ(?![aeiouáéíóú])"
    rf"|(?<!{_LETTER})è(?={_LETTER})|è(?=[aeiouy{_ACCENTED}])|(?<![aeou])ï|œ(?![udsti])|[iy]æ|æ(?=[aiou])"
)
_BLANKS = re.compile(r"[\t-\r ]+")
_SAMPLE = re.compile(r"[^\W\d_]{,20}[^\0-\x7f][^\W\d_]{,20}")


def decoded(data: bytes, encoding: str | None = None) -> tuple[str, Dialect]:
    """Text of a file's bytes, without a byte-order mark, and its encoding.

    Args:
        data: bytes of the file.
        encoding: Codec of Python; None: that of a byte-order mark, UTF-8, or Windows-1252 for Western texts.

    Raises:
        DataError: the bytes are not text, or their encoding is unclear; the message lacks the file.
    """
    mark = next((name for mark, name in _MARKS.items() if data.startswith(mark)), None)
    name = encoding or mark or "UTF-8"
    if name == "UTF-8" and (other := _other_encoding(data)):
        raise DataError(f"is not UTF-8 text, it looks like {other}")
    try:
        text = data.decode(name)
    except LookupError as error:
        codecs_of_python = "a codec of Python, such as utf-8, windows-1252, windows-1251, shift_jis or gbk"
        raise DataError(f"cannot be read with encoding '{name}'; write {codecs_of_python}") from error
    except ValueError as error:
        if encoding or mark:
            raise DataError(f"cannot be decoded as {name} ({error}); {_SAVE}") from error
        return _western(data)
    if "\0" in text:
        raise DataError(f"cannot be decoded as {name}, as it holds NUL; {_SAVE}")
    return text.removeprefix("\ufeff"), Dialect(name)


def _other_encoding(data: bytes) -> str | None:
    if b"\x1b$" in data:
        return f"ISO-2022; {_SAVE} (iso-2022-jp, or the like)"
    if b"\0" not in data:
        return None
    if data[:1000].count(0) > len(data[:1000]) // 4:
        return f"UTF-16 or UTF-32; {_SAVE} (utf-16-le, or the like)"
    return "no text at all, or UTF-16; save it as UTF-8"


def _western(data: bytes) -> tuple[str, Dialect]:
    """Text in Windows-1252, if every accented letter and sign is where Western texts have it."""
    remedy = "windows-1252, windows-1250, windows-1251, shift_jis, gbk, or the like"
    try:
        text = data.decode("windows-1252")
    except UnicodeDecodeError as error:
        raise DataError(f"is neither UTF-8 nor Windows-1252; {_SAVE} ({remedy})") from error
    words = [word for word in dict.fromkeys(_BLANKS.split(text)) if not word.isascii() or not word.isprintable()]
    if odd := next((match for word in words if (match := _ODD.search(word.lower()))), None):
        seen = next(word for word in words if word.lower() == odd.string)[max(odd.start() - 10, 0) : odd.end() + 10]
        raise DataError(f"is not UTF-8, and as Windows-1252 it would have {seen!r}; {_SAVE} ({remedy})")
    return text, Dialect("Windows-1252", sample=next(match[0] for word in words if (match := _SAMPLE.search(word))))


# ---- rows

_TAB = "\t"
_DELIMITERS = "\t;|,"  # the first of equally likely ones: names have commas rather than tabs
_SEPARATOR = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # a first line that Excel writes and reads
_QUOTED = re.compile(r'"[^"]*"')
_ROW = re.compile(r'(?:"[^"]*"|[^"\r\n]+)+')
_LOOKED_AT = 50  # rows that decide the delimiter


class _Record(NamedTuple):
    """Fields of a row, and its first and last line."""

    fields: list[str]
    first: int
    last: int


def delimited_rows(text: str) -> tuple[Rows, str]:
    """Columns of a table with a heading, as texts, and its delimiter; an empty field is None.

    Raises:
        DataError: a row does not have the heading's fields, or quotes are ambiguous; the message lacks the file.
    """
    # a carriage return among line feeds does not end a line, and csv refuses it outside quotes
    lines = io.StringIO(text, newline="\n" if "\n" in text else "").readlines()
    given = _SEPARATOR.fullmatch(lines[0]) if lines else None
    start = next((number for number, line in enumerate(lines) if number >= bool(given) and line.strip()), None)
    if start is None:
        raise DataError("has no rows")
    delimiter = given[1] if given else _delimiter("".join(lines[start : start + 20 * _LOOKED_AT]))
    return _columns(_meant(lines, start, delimiter), delimiter), delimiter


def _delimiter(text: str) -> str:
    """First sign that divides the heading and all rows alike; else the most frequent one in the first two lines."""
    rows = [_QUOTED.sub("", row[0]) for row in islice(_ROW.finditer(text), _LOOKED_AT)] or [""]
    counts = {sign: [row.count(sign) for row in rows] for sign in _DELIMITERS}
    alike = next((sign for sign, own in counts.items() if own[0] and len({*own}) == 1 < len(own)), None)
    return alike or max(_DELIMITERS, key=lambda sign: counts[sign][:2])


def _meant(lines: Sequence[str], start: int, delimiter: str) -> list[_Record]:
    """Records of lines; a space after a delimiter is dropped if the heading, or a quote, has one there."""
    records, spaced = (_records(lines, start, delimiter, skipinitialspace=skips) for skips in (False, True))
    heading = records[0].fields
    pairs = zip(records, spaced, strict=False)
    by_hand = any(list(map(str.lstrip, one.fields)) != list(map(str.lstrip, other.fields)) for one, other in pairs)
    if by_hand or (len(heading) > 1 and all(name.startswith(" ") for name in heading[1:])):
        records = spaced
    long = next((one for one in records if one.last > one.first), None)
    if long and len(heading) > 1 and not _encloses(lines, records, delimiter):
        plain = _records(lines, start, delimiter, quoting=csv.QUOTE_NONE)
        if all(len(one.fields) == len(heading) for one in plain if one.fields):
            what = f"lines {long.first} to {long.last} are one row if their quotes enclose a text, several if not"
            remedy = "put the heading's names in quotes for the one, each text for the other, with quotes in it twice"
            raise DataError(f"{what}; {remedy}")
    return records


def _encloses(lines: Sequence[str], records: Sequence[_Record], delimiter: str) -> bool:
    """True if quotes certainly enclose fields, rather than being characters of texts.

    Signs of it: quoted names in the heading, doubled quotes, line ends within quotes that differ from those of rows,
    and commas of prose, followed by a space, that would be delimiters.
    """
    heading = lines[records[0].first - 1].lstrip()
    if heading.startswith('"') or f'{delimiter}"' in heading or any('""' in line for line in lines):
        return True
    within = {_end(lines[number - 1]) for one in records for number in range(one.first, one.last)}
    if within.isdisjoint(_end(lines[one.last - 1]) for one in records if lines[one.last - 1].endswith(("\n", "\r"))):
        return True
    prose = any(f"{delimiter} " in text for one in records if one.last > one.first for text in one.fields)
    return prose and delimiter in ",;" and not any(text[:1] == " " for one in records for text in one.fields)


def _end(line: str) -> str:
    return line[len(line.rstrip("\r\n")) :]


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
    pairs = zip(names, columns, strict=False)
    return {name or "Unnamed: 0": [value or None for value in own] for name, own in pairs if name or any(own)}


# ---- numbers

_MISSING = re.compile(r"|#?n/?a|n\.[ad]\.|#nv|nan|null|--?|[–—.?]|k\.a\.", re.IGNORECASE)
_DAY = re.compile(r"(0?[1-9]|[12]\d|3[01])\.(0?[1-9]|1[0-2])")
_TELEPHONE = re.compile(r"\d{3} \d{3} \d{3}")
_WHOLE = re.compile(r"[-+]?\d+")
_NUMERIC = r"[\W_]*\d(?:[\W\d_]|(?<=\d)[eE](?=[-+]?\d))*"
_SIGN = r"[!-~¡-\u052f\u2010-\u2027\u2030-\u22ff]"  # of units and codes; scripts that need no spaces have others
_NO_WORDS = re.compile(
    rf"{_NUMERIC}|(?=\D*\d){_SIGN}+"  # numbers, dates and times; codes
    rf"|{_NUMERIC}(?<=\s){_SIGN}+(?:\s{_SIGN}{{1,4}})?"  # 5 mg/l, 90 ml/min/1,73 m², 12 Jan 2024
)
_WITH_UNIT = re.compile(r"(?:[<>≤≥]\s*)?[-+−]?\d+(?:[.,]\d+)*(?:\s?[%‰€$£°]|\s[^\W\d_])[^\s\d]*")


def _form(decimal: str) -> re.Pattern[str]:
    group = rf"(?P<group>[ \xa0\u2009\u202f'’{'.' if decimal == ',' else ','}])"
    integer = rf"(?:0|[1-9]\d*|[1-9]\d{{0,2}}{group}\d{{3}}(?:(?P=group)\d{{3}})*)"
    # a plus before more digits is that of a telephone, and 1e5 is a name
    sign = r"(?:[-−]|\+(?=\d{1,4}(?!\d)))?"
    parts = rf"(?:[{decimal}]\d+(?:e[-+]?\d{{1,3}})?|e[-+]\d{{1,3}})?"
    return re.compile(rf"(?ai){sign}(?:{integer}{parts}|[{decimal}]\d+)")


_FORMS = {decimal: _form(decimal) for decimal in ".,"}
_Parsed = dict[str, int | float]


class Numbers(list[Any]):
    """A column of numbers, with their original texts and the decimal sign of these."""

    def __init__(self, numbers: Iterable[Any], texts: list[str | None], decimal: str) -> None:
        super().__init__(numbers)
        self.texts, self.decimal = texts, decimal


def as_written(column: list[Any]) -> list[Any]:
    """Original texts of a column of numbers of a delimited table; any other column unchanged."""
    return column.texts if isinstance(column, Numbers) else column


def joined(columns: Sequence[list[Any]]) -> list[Any]:
    """Concatenated column of several files; texts if one file has texts, or if all numbers together are codes."""
    types = [{*map(type, column)} - {type(None)} for column in columns]
    are_texts = {str} in types and all(one == {str} or one <= {int, float} for one in types)
    own = [column for column, one in zip(columns, types, strict=True) if one]
    numbers = [column for column in own if isinstance(column, Numbers)]
    decimals = {column.decimal for column in numbers}
    if len(own) == len(numbers) > 1 == len(decimals):
        are_texts = _parsed(_known(chain(*(column.texts for column in numbers))), *decimals) is None
    if are_texts:
        columns = [[value if value is None else str(value) for value in as_written(column)] for column in columns]
    return [*chain(*columns)]


def looks_missing(value: str) -> bool:
    """True if a text is empty or a usual mark of missing cells: ``NA``, ``k.A.``, ``-`` and the like."""
    return _MISSING.fullmatch(value.strip()) is not None


def is_numeric_text(values: Iterable[str | None]) -> bool:
    """True if a column of texts has only numbers, also with units, dates, times, codes and the like, and no words."""
    known = [value.strip() for value in values if value is not None and not looks_missing(value)]
    return bool(known) and all(map(_NO_WORDS.fullmatch, known))


def with_numbers(rows: Rows, dialect: Dialect, keeps: Callable[[str], bool]) -> tuple[Rows, Dialect]:
    """Rows with number columns in place of text columns that hold only numbers and marks of missing ones.

    Args:
        rows: Rows of a delimited table.
        dialect: Dialect of its file, with ``decimal`` as set by the user, or None.
        keeps: True for the names of columns that stay texts.

    Raises:
        DataError: a sign may be decimal or between thousands; the message lacks the file.
    """
    known = {name: own for name, column in rows.items() if not keeps(name) and (own := _known(column))}
    signs = dialect.decimal or ".,"
    readings = {
        name: {sign: parsed for sign in signs if (parsed := _parsed(own, sign)) is not None}
        for name, own in known.items()
    }
    likely = _likely_signs(own for name, own in known.items() if not readings[name])
    decimal = dialect.decimal or _decimal(readings, likely, dialect.delimiter)
    columns, missing, mixed, is_used = Rows(), Counter[tuple[str, str]](), dict[str, str](), False
    for name, column in rows.items():
        if (number_of := readings.get(name, {}).get(decimal)) is None:
            columns[name] = column
            own = known.get(name, [])
            tried = decimal if readings.get(name) else decimal + signs.replace(decimal, "")
            odd = min((_odd(own, sign) for sign in tried), key=len)
            if own and 2 * sum(not _WITH_UNIT.fullmatch(text) for text in odd) <= len(own):
                mixed[name] = (odd or own)[0]
            continue
        numbers = {cell: number_of.get(cell.strip()) for cell in dict.fromkeys(column) if cell}
        columns[name] = Numbers((cell and numbers[cell] for cell in column), column, decimal)
        for cell in (cell for cell, number in numbers.items() if number is None):
            missing[name, cell.strip()] += column.count(cell)
        is_used |= any("." in text or "," in text for text in number_of)
    shown = decimal if is_used or dialect.decimal else None
    return columns, replace(dialect, decimal=shown, missing=dict(missing), mixed=mixed)


def _known(column: Iterable[str | None]) -> list[str]:
    """Distinct texts of a column, in order, without marks of missing cells."""
    return [text for text in dict.fromkeys(cell.strip() for cell in column if cell) if not looks_missing(text)]


def _odd(texts: Iterable[str], decimal: str) -> list[str]:
    """Texts that are not numbers with this decimal sign."""
    return [text for text in texts if not _FORMS[decimal].fullmatch(text)]


def _likely_signs(columns: Iterable[Sequence[str]]) -> set[str]:
    """Decimal signs with which at least half of a mixed column's texts are numbers, and fewer with the other sign."""
    likely = set[str]()
    for own in columns:
        counts = {sign: len(_odd(own, sign)) for sign in ".,"}
        likely |= {sign for sign, odd in counts.items() if 0 < odd <= len(own) / 2 and odd < max(counts.values())}
    return likely


def _parsed(texts: Collection[str], decimal: str) -> _Parsed | None:
    """Text -> its number; None if one is not a number with this decimal sign, or if together they are codes."""
    plain, groups = dict[str, str](), set[str]()
    for text in texts:
        if (match := _FORMS[decimal].fullmatch(text)) is None:
            return None
        groups.update(match["group"] or ())
        plain[text] = text.replace(match["group"] or " ", "").replace(decimal, ".").replace("−", "-").lower()
    number_type = int if all(map(_WHOLE.fullmatch, plain.values())) else float
    numbers = {text: number_type(digits) for text, digits in plain.items()}
    return None if _are_codes(plain, numbers, groups, decimal) else numbers


def _are_codes(plain: Mapping[str, str], numbers: _Parsed, groups: Collection[str], decimal: str) -> bool:
    """True if 64 bits cannot hold the numbers, or if their writing carries more information.

    Signs of the latter: different signs between thousands, the form of telephone numbers, and with decimal points one
    number written in two ways, or trailing zeros among fractions of different lengths, as in ICD.
    """
    integers = [(int(digits), numbers[text]) for text, digits in plain.items() if _WHOLE.fullmatch(digits)]
    are_exact = all(-(1 << 63) <= integer < 1 << 63 and integer == number for integer, number in integers)
    if not are_exact or not all(map(math.isfinite, numbers.values())) or len({*map(str.strip, groups)}) > 1:
        return True
    if groups or decimal == ",":
        return " " in groups and all(map(_TELEPHONE.fullmatch, plain))
    parts = [digits.partition("e")[0].partition(".")[2] for digits in plain.values()]
    has_noughts = any(part.endswith("0") and part != "0" for part in parts) and len({*map(len, parts)}) > 1
    return has_noughts or len({*numbers.values()}) < len(numbers)


def _decimal(readings: Mapping[str, Mapping[str, _Parsed]], likely: Collection[str], delimiter: str | None) -> str:
    """Decimal sign of a table: the only sign with which some of its columns are numbers.

    If every column can be read with both signs, mixed columns decide.

    Raises:
        DataError: columns need different signs, or all columns can be read with both.
    """
    only = {sign: {name: by[sign] for name, by in readings.items() if {*by} == {sign}} for sign in ".,"}
    points = only["."]
    # 1,234 may be thousands where commas are between fields too
    commas = {name: own for name, own in only[","].items() if delimiter != "," or _odd(own, ".")}
    if commas:  # 24.12 is a day where decimals have commas
        points = {name: own for name, own in points.items() if not all(map(_DAY.fullmatch, own))}
    if commas and points:
        firsts = [(other, *next(iter(one.items()))) for other, one in ((".", commas), (",", points))]
        seen = " and ".join(f"'{next(iter(_odd(own, other) or own))}' in '{name}'" for other, name, own in firsts)
        raise DataError(f'has {seen}; give the sign before decimals (reading.decimal, --decimal: "," or ".")')
    if commas:
        return ","
    both = {name: by for name, by in readings.items() if len(by) > 1 and by["."] != by[","]}
    if not points and len(likely) == 1 and not (both and delimiter == ","):  # there it is between thousands as well
        return next(iter(likely))
    if both and not points and delimiter != ",":
        name, by = next(iter(both.items()))
        text = next(text for text, number in by["."].items() if number != by[","][text])
        meant = f"'{text}' in '{name}' may be {by['.'][text]:g} or {by[','][text]:g}"
        raise DataError(f'{meant}; give the sign before decimals (reading.decimal, --decimal: "." or ",")')
    return "."
