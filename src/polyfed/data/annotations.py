"""Files with captions, labels or texts, as people have them: tables, JSON lines, COCO, Karpathy, Flickr."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from polyfed.core.errors import DataError, nearest
from polyfed.core.untrusted import file_json

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
    for pattern in _KNOWN if has_pictures else _KNOWN[:-1]:
        found = [file for file in sorted(folder.glob(pattern)) if file.suffix in _READABLE]
        if found:
            return found
    return []


def _files_of(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in suffixes)


def read_annotations(file: Path, file_column: str | None = None) -> pd.DataFrame:
    """The rows of a file; where they name pictures, the column is called ``file_name``, and may repeat.

    Args:
        file: CSV, TSV, JSON lines, text, or JSON of COCO or Karpathy.
        file_column: what the file itself calls the column of pictures; None: one of the usual names.

    Raises:
        DataError: the file cannot be read as what its ending says, or has no such column.
    """
    try:
        rows = _reader(file)(file)
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:  # pandas raises ValueErrors of its own
        reason = " ".join(str(error).split())
        raise DataError(
            f"'{file}' cannot be read as {_reader(file).__doc__} ({reason}); mend it or leave it out"
        ) from error
    if rows.empty:
        raise DataError(f"'{file}' has no rows")
    return _with_file_names(rows, file, file_column)


def _reader(file: Path) -> Callable[[Path], pd.DataFrame]:
    if file.suffix == ".json":
        return _json
    if file.suffix in (".jsonl", ".ndjson"):
        return _json_lines
    if file.suffix in (".csv", ".tsv"):
        return _csv
    first = file.open(encoding="utf-8", errors="replace").readline()
    if _TOKEN.fullmatch(first.strip()) and "." in first.split("\t")[0]:
        return _tokens
    return _csv if first.lower().replace(" ", "").startswith(("image,caption", "image|caption")) else _lines


def _csv(file: Path) -> pd.DataFrame:
    """a table with a heading"""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        heading = lines.readline()
    delimiter = max(_DELIMITERS, key=heading.count)
    # an empty field is missing; "NA" and "None" are texts
    rows = pd.read_csv(
        file,
        sep=delimiter,
        encoding="utf-8-sig",
        keep_default_na=False,
        na_values=[""],
        skipinitialspace=True,
        dtype_backend="pyarrow",
    )
    return rows.rename(columns=lambda name: str(name).strip())


def _json_lines(file: Path) -> pd.DataFrame:
    """JSON objects, one a line"""
    with file.open(encoding="utf-8") as lines:
        return pd.DataFrame([json.loads(line) for line in lines if line.strip()])


def _lines(file: Path) -> pd.DataFrame:
    """texts, one a line"""
    texts = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return pd.DataFrame({"text": [text for text in texts if text]})


def _tokens(file: Path) -> pd.DataFrame:
    """lines of a picture, a tab and a caption"""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    matches = [_TOKEN.fullmatch(line.strip()) for line in lines]
    if None in matches:
        raise ValueError(f"line {matches.index(None) + 1} is '{lines[matches.index(None)][:60]}'")
    pairs = [(match["file"], match["text"]) for match in matches if match is not None]
    return pd.DataFrame(pairs, columns=[FILE, CAPTIONS])


def _json(file: Path) -> pd.DataFrame:
    """captions of COCO or of Karpathy's splits"""
    content = file_json(file.read_bytes())
    images: Sequence[dict[str, Any]] = content["images"]
    if images and "sentences" in images[0]:
        return pd.DataFrame(_karpathy(image) for image in images)
    if not any("caption" in entry for entry in content.get("annotations", ())[:1]):
        raise DataError(f"'{file}' has no captions; name the file with captions (captions_*.json) in `annotations`")
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
    lists: Iterable[Path] = sorted(folder.glob("*[iI]mages.txt"))
    splits = {file: split_called(re.sub(r"([a-z])([A-Z])", r"\1 \2", file.stem)) for file in lists}
    return {
        name.strip(): split
        for file, split in splits.items()
        if split is not None
        for name in file.read_text(encoding="utf-8").splitlines()
        if name.strip()
    }
