"""Files with captions, labels or texts, as people have them: tables, JSON lines, COCO, Karpathy, Flickr."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from polyfed.core.errors import DataError, nearest
from polyfed.core.untrusted import file_json
from polyfed.data.files import DELIMITED, Rows, delimited_rows, lines_of, text_of

FILE, SPLIT, CAPTIONS = "file_name", "split", "captions"
"""Columns of pictures' file names, of splits, and of captions where a layout has no name of its own for them."""

SPLIT_NAMES = {
    "train": ("train", "training", "restval"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
"""Our splits, and what others call them; Karpathy's ``restval`` is trained on."""

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
    kind = int if all(text.removeprefix("-").isdigit() for text in known) else float
    number_of = {text: kind(text) for text in known}
    # a whole number among others is written without a point; one of 65 bits is a name
    written = all(text in (str(number), f"{number:.0f}") for text, number in number_of.items())
    fits = kind is float or all(-(1 << 63) <= number < 1 << 63 for number in number_of.values())
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
    found = column or next((lower[usual] for usual in _FILE_COLUMNS if usual in lower), None)
    if found != FILE and FILE in names:
        raise DataError(f"'{file}': '{found}' (file_column) is beside a column '{FILE}'; rename one of them")
    return {FILE if name == found else name: values for name, values in rows.items()}


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
