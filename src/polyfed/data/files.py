"""Files of annotations: safe reading, tables in any dialect, and captions of known layouts.

Tables are read strictly: every row as its writer meant it, or an error that names the line.
"""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from polyfed.core.errors import DataError, nearest
from polyfed.core.untrusted import file_json
from polyfed.data.dialects import Dialect, Rows, as_written, decoded, delimited_rows, with_numbers

MOST_BYTES = 1 << 32
"""Largest text file that is read."""

_LINE_END = re.compile(r"\r\n|\r|\n")


def regular_bytes(file: Path, folder: Path, most: int, setting: str = "") -> bytes:
    """Bytes of a regular file in a folder, after resolving links; ``setting`` is the name of the limit ``most``.

    Raises:
        ValueError: the file is a pipe or a device, larger than ``most`` bytes, or outside the folder.
        OSError: the file cannot be read.
    """
    top, target = folder.resolve(), file.resolve()
    if not target.is_relative_to(top):
        raise ValueError(f"the path leaves the data set's folder '{folder}'")
    # not blocking: opening a pipe would wait for a writer
    descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("the path is not that of a regular file")
        if status.st_size > most:
            raise ValueError(f"a file of {status.st_size:,} bytes, the limit is {most:,}{setting and f' ({setting})'}")
        # not read(most): Python allocates the requested size
        data = stream.read(status.st_size + 1)
    if len(data) > status.st_size:
        raise ValueError(f"a file of {status.st_size:,} bytes that holds more, as one that is being written does")
    return data


def text_and_dialect(file: Path, folder: Path, encoding: str | None = None) -> tuple[str, Dialect]:
    """Text of a file in a folder, without a byte-order mark, and its encoding.

    Raises:
        DataError: it is not a regular file of the folder, or its encoding is unclear.
    """
    try:
        return decoded(regular_bytes(file, folder, MOST_BYTES), encoding)
    except DataError as error:
        raise DataError(f"'{file}' {error}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"'{file}' cannot be read ({reason}); put a file of text there, or leave it out") from error


def lines_of(text: str) -> list[str]:
    lines = _LINE_END.split(text)
    return lines if lines[-1] else lines[:-1]


FILE, SPLIT, CAPTIONS = "file_name", "split", "captions"
"""Columns of images' file names, of splits, and of captions in layouts that do not name them."""

SPLIT_NAMES = {
    "train": ("train", "training", "restval"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
"""Split -> its usual names; Karpathy's ``restval`` is training data."""


def usual_name(split: str, names: Collection[str]) -> str:
    """Name that a source has for a split: the split's own or a usual one; ``split`` if it has neither."""
    return next((name for name in (split, *SPLIT_NAMES.get(split, ())) if name in names), split)


TEXT_NAMES = (
    *("captions", "caption", "text", "texts", "comment", "sentence", "title", "description", "report", "review"),
    *("finding", "impression", "raw", "question", "answer"),
)
"""Usual names of columns of texts, the likeliest first."""

_FILE_COLUMNS = (FILE, "filename", "file", "image", "image_name", "image_path", "img", "picture", "photo", "path")
_KNOWN = (
    *("dataset_*.json", "dataset.json", "annotations/captions_*.json", "captions_*.json"),
    *("metadata.csv", "metadata.jsonl", "*/metadata.csv", "*/metadata.jsonl", "captions.*", "labels.*"),
    "results.csv",  # Flickr30k's; without images it may be anything
)
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson")
_READABLE = (".json", *_TABLES, ".txt")
_OF_MASKS = re.compile(r"mas(k|que|cara)|segm|annot|truth|(^|[\W_])(seg|gt|label)s?([\W_]|$)", re.IGNORECASE)
_LOOKED_AT = 10_000  # rows of which values are compared with names of files
SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
"""Files that mark a folder written by ``save_to_disk`` of ``datasets``."""


def holds_texts(name: str) -> bool:
    """True if a column holds texts by its name, whatever its values look like."""
    return name.lower() in TEXT_NAMES or name.lower().removesuffix("s") in TEXT_NAMES


def split_called(name: str) -> str | None:
    """Split with a usual name among the words of ``name``, as in ``val2017``; None if it has none."""
    words = _words(name)
    return next((split for split, names in SPLIT_NAMES.items() if not set(words).isdisjoint(names)), None)


def beside_split(name: str) -> tuple[str, ...]:
    """Words of a name that do not name a split."""
    return tuple(word for word in _words(name) if split_called(word) is None)


def _words(name: str) -> list[str]:
    return re.sub(r"[\W\d_]+", " ", name.lower()).split()


def annotation_files(folder: Path, has_images: bool) -> list[Path]:
    """Files of a folder that hold captions, labels or texts; empty for images alone.

    Raises:
        DataError: there are several without a known name.
    """
    if any((folder / name).is_file() for name in SAVED) and any(folder.rglob("*.arrow")):
        source = f"{{name: arrow, path: {folder.name}}}"
        raise DataError(f"'{folder}' was saved by `datasets`, and needs no preparation; the source {source} opens it")
    known = _known_files(folder, has_images)
    if known:
        return known
    tables = _files_of(folder, _TABLES)
    if not has_images:
        return tables or _files_of(folder, (".txt",))
    if len(tables) > 1 and not all(split_called(file.stem) for file in tables):
        names = ", ".join(file.name for file in tables)
        raise DataError(f"'{folder}': any of {names} may belong to the images; name it in `annotations`")
    return tables


def _known_files(folder: Path, has_images: bool) -> list[Path]:
    """Files of the first known name in the folder, in any case, as on many file systems."""
    files = {file.relative_to(folder).as_posix().lower(): file for file in (*folder.glob("*"), *folder.glob("*/*"))}
    readable = {name: file for name, file in sorted(files.items()) if file.suffix.lower() in _READABLE}
    for pattern in _KNOWN if has_images else _KNOWN[:-1]:
        deep = pattern.count("/")
        matching = [one for name, one in readable.items() if name.count("/") == deep and fnmatchcase(name, pattern)]
        if matching:
            return matching
    return []


def _files_of(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in suffixes)


def read_annotations(
    file: Path,
    file_column: str | None = None,
    folder: Path | None = None,
    *,
    files: Collection[str] = (),
    encoding: str | None = None,
    decimal: Literal[".", ","] | None = None,
) -> tuple[Rows, Dialect]:
    """Rows of a file and its dialect; a column that names files is called ``file_name``, and may repeat.

    Args:
        file: CSV, TSV, JSON lines, text, or JSON of COCO or Karpathy.
        file_column: Name of the column of images in the file; None: detected by its name or content.
        folder: Folder of the data set, which the file must lie in; None: its own.
        files: Paths of the folder's images or recordings, by which the column that names them is detected.
        encoding: Codec of Python; None: detected.
        decimal: Sign before decimals; None: detected.

    Raises:
        DataError: the file does not have the form of its ending, is ambiguous, or lacks the column.
    """
    text, dialect = text_and_dialect(file, file.parent if folder is None else folder, encoding)
    reader = _reader(file, text)
    try:
        if reader is None:
            rows, delimiter = delimited_rows(text)
            dialect = replace(dialect, delimiter=delimiter, decimal=decimal)
            rows, dialect = with_numbers(rows, dialect, lambda name: name.lower() in _FILE_COLUMNS or holds_texts(name))
        else:
            rows = reader(text)
    except DataError as error:
        raise DataError(f"'{file}' {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        form = reader.__doc__ if reader else "a table with a heading"
        raise DataError(f"'{file}' cannot be read as {form} ({reason}); mend it or leave it out") from error
    if not any(rows.values()):
        raise DataError(f"'{file}' has no rows")
    count = len(next(iter(rows.values())))
    return _with_file_names(rows, file, file_column, files), replace(dialect, rows=count)


def _reader(file: Path, text: str) -> Callable[[str], Rows] | None:
    """Reader for the form of a file; None: a delimited table."""
    suffix = file.suffix.lower()
    if suffix == ".json":
        return _json
    if suffix in (".jsonl", ".ndjson"):
        return _json_lines
    first = next(iter(lines_of(text[:10_000])), "").lower().replace(" ", "")
    return None if suffix in (".csv", ".tsv") or first.startswith(("image,caption", "image|caption")) else _lines


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


def _with_file_names(rows: Rows, file: Path, column: str | None, files: Collection[str]) -> Rows:
    names = list(rows)
    if column is not None and column not in names:
        raise DataError(f"'{file}': no column '{column}' (file_column, --file-column); {nearest(column, names)}")
    file_column = column or _file_column(rows, file, files)
    if file_column != FILE and FILE in names:
        raise DataError(f"'{file}' has both '{file_column}' (file_column) and '{FILE}'; rename one of them")
    return {FILE if name == file_column else name: values for name, values in rows.items()} | (
        {FILE: as_written(rows[file_column])} if file_column else {}
    )


def _file_column(rows: Rows, file: Path, files: Collection[str]) -> str | None:
    """Column of file names: one with a usual name, unless only another names files; of several, not that of masks.

    Raises:
        DataError: several columns name files of the folder.
    """
    lower = {name.lower(): name for name in reversed(list(rows))}
    usual = next((lower[name] for name in _FILE_COLUMNS if name in lower), None)
    if usual == FILE or not files or (usual and not set(files).isdisjoint(map(str, rows[usual]))):
        return usual
    naming = _naming_columns(rows, files)
    if usual in naming or not naming:
        return usual
    naming = [name for name in naming if not _is_of_masks(name, rows[name])] or naming
    if len(naming) > 1:
        which = "give that of its images as file_column (--file-column)"
        raise DataError(f"'{file}': the columns {', '.join(naming)} name files of the folder; {which}")
    return naming[0]


def _naming_columns(rows: Rows, files: Collection[str]) -> list[str]:
    """Columns with file names in at least half of their values, with endings or, if no column has these, without.

    Numbers without an ending may be ages or patients, and never count as file names.
    """
    called = set(map(_last_part, files))
    stems = {name.rpartition(".")[0] for name in called}
    first = {name: as_written(column)[:_LOOKED_AT] for name, column in rows.items()}
    values = {name: {_last_part(str(one)) for one in own if one is not None} for name, own in first.items()}

    def names_some(own: set[str], known: set[str]) -> bool:
        same = own & known
        return 2 * len(same) >= len(own) and not all(map(str.isdecimal, same))

    by_name = [name for name, own in values.items() if names_some(own, called)]
    return by_name or [name for name, own in values.items() if names_some(own, stems)]


def _last_part(path: str) -> str:
    """Name of a file in a form that is the same on all systems."""
    return unicodedata.normalize("NFC", path.strip().replace("\\", "/").rpartition("/")[2]).lower()


def _is_of_masks(name: str, column: Sequence[Any]) -> bool:
    return bool(_OF_MASKS.search(name)) or all(_OF_MASKS.search(value) for value in column if isinstance(value, str))
