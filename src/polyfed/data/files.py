"""Files as people have them: whose bytes may be read, how texts are encoded, tables, and captions of known layouts.

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
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from polyfed.core.errors import DataError, nearest
from polyfed.core.untrusted import file_json

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


FILE, SPLIT, CAPTIONS = "file_name", "split", "captions"
"""Columns of pictures' file names, of splits, and of captions where a layout has no name of its own for them."""

SPLIT_NAMES = {
    "train": ("train", "training", "restval"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
"""Our splits, and what others call them; Karpathy's ``restval`` is trained on."""


def usual_name(split: str, names: Collection[str]) -> str:
    """What a source calls our split, of the names that it has: so itself, or as others do; ``split`` if it has none."""
    return next((name for name in (split, *SPLIT_NAMES.get(split, ())) if name in names), split)


TEXT_NAMES = (
    *("captions", "caption", "text", "texts", "comment", "sentence", "title", "description", "report", "review"),
    *("finding", "impression", "raw", "question", "answer"),
)
"""Usual names of columns of texts, the likeliest first."""

_FILE_COLUMNS = (FILE, "filename", "file", "image", "image_name", "image_path", "img", "picture", "photo", "path")
_KNOWN = (
    *("dataset_*.json", "dataset.json", "annotations/captions_*.json", "captions_*.json", "*.token", "*.token.txt"),
    *("metadata.csv", "metadata.jsonl", "*/metadata.csv", "*/metadata.jsonl", "captions.*", "labels.*"),
    "results.csv",  # Flickr30k's; without pictures it may be anything
)
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson")
_READABLE = (".json", *_TABLES, ".txt", ".token")
_TOKEN = re.compile(r"(?P<file>[^#\t]+)(#\d+)?\t(?P<text>.+)")
# written as programs write numbers: 007, 1e5 and 12:30 are names
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?|-?\d(\.\d+)?e[+-]\d+", re.ASCII)
SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
"""Files, of which any is in what ``save_to_disk`` of ``datasets`` wrote."""


def holds_texts(name: str) -> bool:
    """Whether a column, by its name, holds texts: neither numbers nor classes, whatever these look like."""
    return name.lower() in TEXT_NAMES or name.lower().removesuffix("s") in TEXT_NAMES


def split_called(name: str) -> str | None:
    """Our split that somebody calls so, as in ``val2017``; None if it is none."""
    words = _words(name)
    return next((split for split, names in SPLIT_NAMES.items() if not set(words).isdisjoint(names)), None)


def beside_split(name: str) -> tuple[str, ...]:
    """The words of a name that call no split."""
    return tuple(word for word in _words(name) if split_called(word) is None)


def _words(name: str) -> list[str]:
    return re.sub(r"[\W\d_]+", " ", name.lower()).split()


def annotation_files(folder: Path, has_pictures: bool) -> list[Path]:
    """The files of a folder that hold captions, labels or texts; none if pictures lie there alone.

    Raises:
        DataError: there are several that none of the known names tells apart.
    """
    if any((folder / name).is_file() for name in SAVED) and any(folder.rglob("*.arrow")):
        source = f"{{name: arrow, path: {folder.name}}}"
        raise DataError(f"'{folder}' was saved by `datasets`, and needs no preparation; the source {source} opens it")
    known = _known_files(folder, has_pictures)
    if known:
        return known
    tables = _files_of(folder, _TABLES)
    if not has_pictures:
        return tables or _files_of(folder, (".txt",))
    if len(tables) > 1 and not all(split_called(file.stem) for file in tables):
        names = ", ".join(file.name for file in tables)
        raise DataError(f"'{folder}': which of {names} says what belongs to the pictures? name it in `annotations`")
    return tables


def _known_files(folder: Path, has_pictures: bool) -> list[Path]:
    """Files of the first known name that there are; names are alike in capitals, as on many file systems."""
    files = {file.relative_to(folder).as_posix().lower(): file for file in (*folder.glob("*"), *folder.glob("*/*"))}
    readable = {name: file for name, file in sorted(files.items()) if file.suffix.lower() in _READABLE}
    for pattern in _KNOWN if has_pictures else _KNOWN[:-1]:
        deep = pattern.count("/")
        matching = [one for name, one in readable.items() if name.count("/") == deep and fnmatchcase(name, pattern)]
        if matching:
            return matching
    return []


def _files_of(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in suffixes)


def read_annotations(file: Path, file_column: str | None = None, folder: Path | None = None) -> Rows:
    """The rows of a file; where they name pictures, the column is called ``file_name``, and may repeat.

    Args:
        file: CSV, TSV, JSON lines, text, or JSON of COCO or Karpathy.
        file_column: what the file itself calls the column of pictures; None: one of the usual names.
        folder: of the data set, which the file may not lead out of; None: its own.

    Raises:
        DataError: the file cannot be read as what its ending says, or has no such column.
    """
    text = text_of(file, file.parent if folder is None else folder)
    reader = _reader(file, text)
    try:
        rows = reader(text)
    except DataError as error:
        raise DataError(f"'{file}' {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"'{file}' cannot be read as {reader.__doc__} ({reason}); mend it or leave it out") from error
    if not any(rows.values()):
        raise DataError(f"'{file}' has no rows")
    return _with_file_names(rows, file, file_column)


def _reader(file: Path, text: str) -> Callable[[str], Rows]:
    suffix = file.suffix.lower()
    if suffix == ".json":
        return _json
    if suffix in (".jsonl", ".ndjson"):
        return _json_lines
    if suffix in DELIMITED:
        return _csv
    first = next(iter(lines_of(text[:10_000])), "")
    if _TOKEN.fullmatch(first.strip()) and "." in first.split("\t")[0]:
        return _tokens
    return _csv if first.lower().replace(" ", "").startswith(("image,caption", "image|caption")) else _lines


def _csv(text: str) -> Rows:
    """a table with a heading"""
    return {name: _numbers(name, values) for name, values in delimited_rows(text).items()}


def _numbers(name: str, texts: list[str | None]) -> list[Any]:
    """A column as numbers, where writing these gives each text again, and its name is not that of texts."""
    known = {text for text in texts if text is not None}
    is_named_text = name.lower() in _FILE_COLUMNS or holds_texts(name)
    if is_named_text or not known or not all(map(_NUMBER.fullmatch, known)):
        return texts
    number_type = int if all(text.removeprefix("-").isdigit() for text in known) else float
    number_of = {text: number_type(text) for text in known}
    # a whole number among others is written without a point; one of 65 bits is a name
    written = all(text in (str(number), f"{number:.0f}") for text, number in number_of.items())
    fits = number_type is float or all(-(1 << 63) <= number < 1 << 63 for number in number_of.values())
    if not written or not fits or len(set(number_of.values())) < len(known):
        return texts
    return [None if text is None else number_of[text] for text in texts]


def _json_lines(text: str) -> Rows:
    """JSON objects, one a line"""
    rows = []
    for number, line in enumerate(lines_of(text), 1):
        if line.strip():
            rows.append(file_json(line))
            if not isinstance(rows[-1], dict):
                raise ValueError(f"line {number} is a {type(rows[-1]).__name__}, not an object")
    return _rows_of(rows)


def _rows_of(objects: Sequence[dict[str, Any]]) -> Rows:
    names = dict.fromkeys(name for one in objects for name in one)
    return {name: [one.get(name) for one in objects] for name in names}


def _lines(text: str) -> Rows:
    """texts, one a line"""
    return {"text": [line.strip() for line in lines_of(text) if line.strip()]}


def _tokens(text: str) -> Rows:
    """lines of a picture, a tab and a caption"""
    lines = [line.strip() for line in lines_of(text) if line.strip()]
    matches = [_TOKEN.fullmatch(line) for line in lines]
    if None in matches:
        raise ValueError(f"line {matches.index(None) + 1} is '{lines[matches.index(None)][:60]}'")
    return _rows_of([{FILE: match["file"], CAPTIONS: match["text"]} for match in matches if match is not None])


def _json(text: str) -> Rows:
    """captions of COCO or of Karpathy's splits"""
    content = file_json(text)
    images: Sequence[dict[str, Any]] = content["images"]
    if images and "sentences" in images[0] and isinstance(images[0], dict):
        return _rows_of([_karpathy(image) for image in images])
    if not any("caption" in entry for entry in content.get("annotations", ())[:1]):
        raise DataError("has no captions; name the file with captions (captions_*.json) in `annotations`")
    names = {image["id"]: image["file_name"] for image in images}
    entries = content["annotations"]
    return {FILE: [names[one["image_id"]] for one in entries], CAPTIONS: [one["caption"] for one in entries]}


def _karpathy(image: dict[str, Any]) -> dict[str, Any]:
    name = "/".join(filter(None, (image.get("filepath"), image["filename"])))
    return {FILE: name, CAPTIONS: [one["raw"] for one in image["sentences"]], SPLIT: image["split"]}


def _with_file_names(rows: Rows, file: Path, column: str | None) -> Rows:
    names = list(rows)
    if column is not None and column not in names:
        raise DataError(f"'{file}': no column '{column}' (file_column, --file-column); {nearest(column, names)}")
    lower = {name.lower(): name for name in reversed(names)}
    file_column = column or next((lower[usual] for usual in _FILE_COLUMNS if usual in lower), None)
    if file_column != FILE and FILE in names:
        raise DataError(f"'{file}': '{file_column}' (file_column) is beside a column '{FILE}'; rename one of them")
    return {FILE if name == file_column else name: values for name, values in rows.items()}


def listed_splits(folder: Path) -> dict[str, str]:
    """Picture's name -> split, from lists such as ``Flickr_8k.trainImages.txt``; nothing if there are none."""
    lists: Iterable[Path] = sorted(file for file in folder.iterdir() if file.name.lower().endswith("images.txt"))
    splits = {file: split_called(re.sub(r"([a-z])([A-Z])", r"\1 \2", file.stem)) for file in lists}
    return {
        name.strip(): split
        for file, split in splits.items()
        if split is not None
        for name in lines_of(text_of(file, folder))
        if name.strip()
    }
