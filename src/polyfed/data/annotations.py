"""Files with captions, labels or texts, as people have them: tables, JSON lines, COCO, Karpathy, Flickr."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pandas as pd

from polyfed.core.errors import DataError, nearest
from polyfed.core.untrusted import file_json
from polyfed.data.text_files import lines_of, text_of

FILE, SPLIT, CAPTIONS = "file_name", "split", "captions"
"""Columns of pictures' file names, of splits, and of captions where a layout has no name of its own for them."""

SPLIT_NAMES = {
    "train": ("train", "training", "restval"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
"""Our splits, and what others call them; Karpathy's ``restval`` is trained on."""

PICTURES = frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "avif"))

_FILE_COLUMNS = (FILE, "filename", "file", "image", "image_name", "image_path", "img", "picture", "photo", "path")
_KNOWN = (
    *("dataset_*.json", "dataset.json", "annotations/captions_*.json", "captions_*.json", "*.token", "*.token.txt"),
    *("metadata.csv", "metadata.jsonl", "*/metadata.csv", "*/metadata.jsonl", "captions.*", "labels.*"),
    "results.csv",  # Flickr30k's; without pictures it may be anything
)
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson")
_READABLE = (".json", *_TABLES, ".txt", ".token")
_TOKEN = re.compile(r"(?P<file>[^#\t]+)(#\d+)?\t(?P<text>.+)")
_DELIMITERS = ",;\t|"
_SEPARATOR = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # a first line that Excel writes and reads
_QUOTED = re.compile(r'"[^"]*"')
_TEXTS = re.compile("(caption|text|sentence|comment|report|finding|impression|question|answer)s?|raw")
# written as programs write numbers: 007, 1e5 and 12:30 are names
_NUMBER = r"-?(0|[1-9]\d*)(\.\d+)?|-?\d(\.\d+)?[eE]-\d+|-?\d\.\d+[eE]\+?\d+"


def split_called(name: str) -> str | None:
    """Our split that somebody calls so, as in ``val2017``; None if it is none."""
    word = re.sub(r"[\W\d_]+", " ", name.lower()).split()
    return next((split for split, names in SPLIT_NAMES.items() if not set(word).isdisjoint(names)), None)


def annotation_files(folder: Path, has_pictures: bool) -> list[Path]:
    """The files of a folder that hold captions, labels or texts; none if pictures lie there alone.

    Raises:
        DataError: there are several that none of the known names tells apart.
    """
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


def read_annotations(file: Path, file_column: str | None = None, folder: Path | None = None) -> pd.DataFrame:
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
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # pandas raises ValueErrors of its own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"'{file}' cannot be read as {reader.__doc__} ({reason}); mend it or leave it out") from error
    if rows.empty:
        raise DataError(f"'{file}' has no rows")
    return _with_file_names(rows, file, file_column)


def _reader(file: Path, text: str) -> Callable[[str], pd.DataFrame]:
    suffix = file.suffix.lower()
    if suffix == ".json":
        return _json
    if suffix in (".jsonl", ".ndjson"):
        return _json_lines
    if suffix in (".csv", ".tsv"):
        return _csv
    first = next(iter(lines_of(text[:10_000])), "")
    if _TOKEN.fullmatch(first.strip()) and "." in first.split("\t")[0]:
        return _tokens
    return _csv if first.lower().replace(" ", "").startswith(("image,caption", "image|caption")) else _lines


def _csv(text: str) -> pd.DataFrame:
    """a table with a heading"""
    first, start = next(iter(lines_of(text[:100_000])), ""), 0
    if told := _SEPARATOR.fullmatch(first):
        start = 1
        delimiter = told[1]
    else:
        heading = _QUOTED.sub("", first)
        delimiter = max(_DELIMITERS, key=heading.count)
    # an empty field is missing; "NA" and "None" are texts, and so is all else until a whole column is of numbers
    rows = pd.read_csv(
        io.StringIO(text, newline=""),
        sep=delimiter,
        skiprows=start,
        dtype=str,
        keep_default_na=False,
        na_values=[""],
        skipinitialspace=True,
        dtype_backend="pyarrow",
    )
    rows = rows.rename(columns=lambda name: str(name).strip())
    return rows.apply(_numbers)


def _numbers(column: pd.Series) -> pd.Series:
    """A column as numbers, where each value is one as programs write them, and its name is not that of texts."""
    name = str(column.name).lower()
    values = column.dropna()
    if name in _FILE_COLUMNS or _TEXTS.fullmatch(name) or not len(values) or not values.str.fullmatch(_NUMBER).all():
        return column
    return pd.to_numeric(column, dtype_backend="pyarrow")


def _json_lines(text: str) -> pd.DataFrame:
    """JSON objects, one a line"""
    rows = [file_json(line) for line in lines_of(text) if line.strip()]
    if (odd := next((row for row in rows if not isinstance(row, dict)), None)) is not None:
        raise ValueError(f"a line is a {type(odd).__name__}, not an object")
    return pd.DataFrame(rows)


def _lines(text: str) -> pd.DataFrame:
    """texts, one a line"""
    return pd.DataFrame({"text": [line.strip() for line in lines_of(text) if line.strip()]})


def _tokens(text: str) -> pd.DataFrame:
    """lines of a picture, a tab and a caption"""
    lines = [line.strip() for line in lines_of(text) if line.strip()]
    matches = [_TOKEN.fullmatch(line) for line in lines]
    if None in matches:
        raise ValueError(f"line {matches.index(None) + 1} is '{lines[matches.index(None)][:60]}'")
    pairs = [(match["file"], match["text"]) for match in matches if match is not None]
    return pd.DataFrame(pairs, columns=[FILE, CAPTIONS])


def _json(text: str) -> pd.DataFrame:
    """captions of COCO or of Karpathy's splits"""
    content = file_json(text)
    images: Sequence[dict[str, Any]] = content["images"]
    if images and "sentences" in images[0] and isinstance(images[0], dict):
        return pd.DataFrame(_karpathy(image) for image in images)
    if not any("caption" in entry for entry in content.get("annotations", ())[:1]):
        raise DataError("has no captions; name the file with captions (captions_*.json) in `annotations`")
    names = {image["id"]: image["file_name"] for image in images}
    entries = [(names[entry["image_id"]], entry["caption"]) for entry in content["annotations"]]
    return pd.DataFrame(entries, columns=[FILE, CAPTIONS])


def _karpathy(image: dict[str, Any]) -> dict[str, Any]:
    name = "/".join(filter(None, (image.get("filepath"), image["filename"])))
    return {FILE: name, CAPTIONS: [one["raw"] for one in image["sentences"]], SPLIT: image["split"]}


def _with_file_names(rows: pd.DataFrame, file: Path, column: str | None) -> pd.DataFrame:
    names = [str(name) for name in rows.columns]
    if column is not None and column not in names:
        raise DataError(f"'{file}': no column '{column}' (file_column); {nearest(column, names)}")
    lower = {name.lower(): name for name in reversed(names)}
    found = column or next((lower[usual] for usual in _FILE_COLUMNS if usual in lower), None)
    return rows if found is None else rows.rename(columns={found: FILE})


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
