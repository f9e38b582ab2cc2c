"""A folder of pictures or texts as one table: what belongs to each picture, its class folder, and its split."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

import pandas as pd
import pyarrow as pa

from polyfed.core.errors import DataError, nearest
from polyfed.data.annotations import (
    FILE,
    PICTURES,
    SPLIT,
    annotation_files,
    listed_splits,
    read_annotations,
    split_called,
)
from polyfed.data.arrow import fingerprint_of

IMAGE, AUDIO, LABEL = "image", "audio", "label"
"""Columns of pictures, of recordings in a folder without pictures, and of the names of class folders."""

_SOUNDS = frozenset(("wav",))
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_BASE, _TOLD = "_base", "_told"  # folder that names are relative to, and what a file is called, while rows are read


@dataclass(frozen=True)
class FolderLayout:
    """Where a folder's rows are, and how their splits are told; see ``polyfed.data.sources.folder``.

    Attributes:
        path: the folder, or one file of it.
        annotations: file below the folder; None: found.
        file_column: column with file names; None: one of the usual.
        split_column: column that says the split; None: ``split``, if there is one.
        splits: pairs of our split and the names that mean it; empty: the usual ones.
        fractions: pairs of a split and its share, where nothing tells.
        refuses_gaps: whether rows of pictures that are not there are an error.
    """

    path: Path
    annotations: str | None = None
    file_column: str | None = None
    split_column: str | None = None
    splits: tuple[tuple[str, tuple[str, ...]], ...] = ()
    fractions: tuple[tuple[str, float], ...] = ()
    refuses_gaps: bool = True

    @property
    def folder(self) -> Path:
        return self.path.parent if self.path.is_file() else self.path

    def split_called(self, name: str) -> str | None:
        """Our split that a name means; None if it means none."""
        if self.splits:
            return next((split for split, names in self.splits if name in names), None)
        return split_called(name)


@dataclass(frozen=True)
class FolderTable:
    """One row an item.

    Attributes:
        rows: columns of the annotations, and ``image`` (or ``audio``), ``file_name``, ``label`` of files.
        splits: split of each row.
        fingerprint: changes with any file of the folder.
        files: column of the pictures or recordings that the rows name, ``image`` or ``audio``; None: they name none.
        unused: pictures of the folder that no row names.
        without_picture: what rows call pictures that are not there, where these rows are left out.
    """

    rows: pa.Table
    splits: tuple[str, ...]
    fingerprint: str
    files: str | None = None
    unused: tuple[str, ...] = ()
    without_picture: tuple[str, ...] = ()

    def of(self, split: str) -> pa.Table:
        return self.rows.filter(pa.array([one == split for one in self.splits]))


def folder_table(layout: FolderLayout) -> FolderTable:
    """The table of a folder; read once a process while no file of it changes.

    Raises:
        DataError: there is nothing to read, or what there is does not fit together.
    """
    files = _files_in(layout.folder)
    stamp = fingerprint_of(*(part for entry in files.items() for part in entry))
    return _read(layout, stamp)


def _files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Path below the folder -> size and time of every file that is not hidden, in the order of paths."""
    found = {}
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith("."):
                path = Path(top, name)
                found[_readable(path, folder)] = _stamp(path)
    return dict(sorted(found.items()))


def _readable(path: Path, folder: Path) -> str:
    name = path.relative_to(folder).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the name of {name!a} in '{folder}' is not UTF-8; rename it") from error
    return name


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"'{path}' cannot be read ({error.strerror}); mend the link or remove it") from error
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=8)
def _read(layout: FolderLayout, stamp: str) -> FolderTable:
    pictures, column = _with_ending(layout.folder, PICTURES), IMAGE
    if not pictures and (sounds := _with_ending(layout.folder, _SOUNDS)):
        pictures, column = sounds, AUDIO
    rows, without_picture = _rows(layout, pictures)
    splits = _splits(rows, layout)
    table = _arrow(rows.drop(columns=[_BASE, _TOLD], errors="ignore"), layout)
    if FILE not in rows:
        return FolderTable(table, splits, stamp)
    unused = sorted(set(pictures).difference(rows[FILE]))
    return FolderTable(_with_pictures(table, column), splits, stamp, column, tuple(unused), without_picture)


def _with_ending(folder: Path, endings: frozenset[str]) -> list[str]:
    return [name for name in _files_in(folder) if name.rpartition(".")[2].lower() in endings]


def _arrow(rows: pd.DataFrame, layout: FolderLayout) -> pa.Table:
    columns = {}
    for name in rows.columns:
        try:
            columns[str(name)] = pa.array(rows[name], from_pandas=True)
        except (pa.ArrowException, UnicodeError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"'{layout.path}', column '{name}' holds values of several types: {reason}") from error
    return pa.table(columns)


def _rows(layout: FolderLayout, pictures: Sequence[str]) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The rows, and what those that are left out call pictures that are not there."""
    if files := _annotations(layout, pictures):
        rows = pd.concat([_annotated(file, layout) for file in files], ignore_index=True)
        # a file that is named itself may hold texts beside somebody's pictures
        is_of_pictures = FILE in rows or (pictures and not layout.path.is_file())
        if not is_of_pictures:
            return rows, ()
        matched, missing = _matched(rows, pictures, layout, files[0])
        return _joined(matched), missing
    if not pictures:
        wanted = "pictures or WAV files, captions.csv, metadata.csv, train.csv, texts.txt"
        raise DataError(f"there is nothing to read in '{layout.folder}'; it should hold {wanted}, or the like")
    return _class_folders(pictures, layout), ()


def _annotations(layout: FolderLayout, pictures: Sequence[str]) -> list[Path]:
    if layout.path.is_file():
        return [layout.path]
    if layout.annotations is None:
        return annotation_files(layout.folder, bool(pictures))
    file = layout.folder / layout.annotations
    if not file.is_file():
        here = [path.name for path in layout.folder.iterdir() if path.is_file()]
        raise DataError(
            f"there is no file '{layout.annotations}' in '{layout.folder}'; {nearest(file.name, here[:20])}"
        )
    return [file]


def _annotated(file: Path, layout: FolderLayout) -> pd.DataFrame:
    rows = read_annotations(file, layout.file_column, layout.folder)
    base = file.parent.relative_to(layout.folder).as_posix()
    told = file.stem if base in (".", "annotations") else f"{base} {file.stem}"
    return rows.assign(**{_BASE: base, _TOLD: told})


# ---- pictures and their rows


def _matched(
    rows: pd.DataFrame, pictures: Sequence[str], layout: FolderLayout, file: Path
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Rows with the paths of pictures in place of what the file calls them, and what it calls those not there."""
    if FILE not in rows:
        columns = ", ".join(name for name in map(str, rows.columns) if name not in (_BASE, _TOLD))
        raise DataError(
            f"'{file}' has no column of file names, such as file_name; name it in file_column; columns: {columns}"
        )
    place = _finder(pictures)
    paths = [place(str(name), base) for name, base in zip(rows[FILE], rows[_BASE], strict=True)]
    missing = [str(name) for name, path in zip(rows[FILE], paths, strict=True) if path is None]
    _check_gaps(missing, rows, layout, file)
    matched = rows.assign(**{FILE: pd.Series(paths, rows.index, dtype=object)})
    return matched[[path is not None for path in paths]], tuple(dict.fromkeys(missing))


def _check_gaps(missing: Sequence[str], rows: pd.DataFrame, layout: FolderLayout, file: Path) -> None:
    if len(missing) == len(rows):
        raise DataError(
            f"'{file}': no picture called '{missing[0]}', nor any other of its rows, is in '{layout.folder}'"
        )
    if missing and layout.refuses_gaps:
        raise DataError(
            f"'{file}' names {len(set(missing))} pictures that are not in '{layout.folder}', first '{missing[0]}'; "
            "add them, or leave these rows out (incomplete: leave_out)"
        )


def _finder(pictures: Sequence[str]) -> Callable[[str, str], str | None]:
    """Finds a picture by its path, by its name in whatever folder, or by its name without ending.

    As systems write names in several ways, accents are composed and endings in small letters before names are compared;
    a name that is letter by letter that of a file is that file's all the same.
    """
    paths = set(pictures)
    by_name: dict[str, list[str]] = {}
    for path in pictures:
        pure = PurePosixPath(_folded(path))
        for name in {str(pure), pure.name, pure.stem}:
            by_name.setdefault(name, []).append(path)

    def find(name: str, base: str) -> str | None:
        wanted = PurePosixPath(base, name.strip().replace("\\", "/")).as_posix()
        if wanted in paths:
            return wanted
        folded = PurePosixPath(_folded(wanted))
        candidates = by_name.get(str(folded)) or by_name.get(folded.name, [])
        if len(candidates) > 1:
            raise DataError(f"'{name}' may be '{candidates[0]}' or '{candidates[1]}'; write its path below the folder")
        return candidates[0] if candidates else None

    return find


def _folded(path: str) -> str:
    pure = PurePosixPath(unicodedata.normalize("NFC", path))
    return str(pure.with_suffix(pure.suffix.lower())) if pure.suffix else str(pure)


def _joined(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a picture; what differs among its rows becomes a list, without the missing ones."""
    if rows[FILE].is_unique:
        return rows
    groups = rows.groupby(FILE, sort=False)
    columns = {}
    for name in rows.columns.drop(FILE):
        differs = any(isinstance(value, list) for value in rows[name]) or groups[name].nunique(dropna=False).max() > 1
        columns[name] = groups[name].agg(_entries if differs else "first")
    return pd.DataFrame(columns).reset_index()


def _entries(values: pd.Series) -> list[object]:
    return values.dropna().tolist()


def _class_folders(pictures: Sequence[str], layout: FolderLayout) -> pd.DataFrame:
    """Pictures with the last folder above them that is no split's as label."""
    labels = [
        next((part for part in reversed(_folders(path)) if not layout.split_called(part)), None) for path in pictures
    ]
    if None in labels:
        raise DataError(
            f"'{layout.folder}' has pictures alone, such as '{pictures[labels.index(None)]}'; add a captions.csv "
            "(columns file_name, caption), or put them into folders of their classes"
        )
    return pd.DataFrame({FILE: list(pictures), LABEL: labels})


def _folders(path: str) -> tuple[str, ...]:
    return PurePosixPath(path).parts[:-1]


def _with_pictures(table: pa.Table, column: str) -> pa.Table:
    paths = table.column(FILE).combine_chunks().cast(pa.string())
    image = pa.StructArray.from_arrays([pa.nulls(len(paths), pa.binary()), paths], fields=list(_IMAGE))
    if column in table.column_names:
        table = table.drop_columns([column])
    return table.append_column(column, image)


# ---- splits


def _splits(rows: pd.DataFrame, layout: FolderLayout) -> tuple[str, ...]:
    """Split of each row: by a column, by files or folders if these tell at least two, by lists; else drawn."""
    column = layout.split_column or SPLIT
    if column in rows:
        return tuple(_of_column(rows[column], column, layout))
    if layout.split_column is not None:
        names = [str(name) for name in rows.columns if name not in (_BASE, _TOLD)]
        raise DataError(f"'{layout.folder}': no column '{column}' (split_column); {nearest(column, names)}")
    for told in _told(rows, layout):
        if None not in told and len(set(told)) > 1:
            return tuple(str(split) for split in told)
    return _drawn(rows, layout)


def _of_column(values: Iterable[object], column: str, layout: FolderLayout) -> Iterable[str]:
    for value in values:
        split = layout.split_called(str(value))
        if split is None:
            named = "; ".join(f"{ours}: {', '.join(names)}" for ours, names in layout.splits)
            valid = named or "train, validation, test"
            raise DataError(
                f"'{layout.folder}', column '{column}': '{value}' is none of the splits ({valid}); "
                "say in `splits` what it belongs to"
            )
        yield split


def _told(rows: pd.DataFrame, layout: FolderLayout) -> Iterable[list[str | None]]:
    if _TOLD in rows:
        yield [layout.split_called(str(name)) for name in rows[_TOLD]]
    if FILE in rows:
        yield [next(filter(None, map(layout.split_called, _folders(path))), None) for path in rows[FILE]]
        listed: Mapping[str, str] = listed_splits(layout.folder)
        yield [listed.get(PurePosixPath(path).name) for path in rows[FILE]]


def _drawn(rows: pd.DataFrame, layout: FolderLayout) -> tuple[str, ...]:
    """By a hash of each picture's path, or of a text's content: the same on every machine, equal texts together."""
    content = rows.drop(columns=[_BASE, _TOLD], errors="ignore")
    keys = rows[FILE] if FILE in rows else content.map(str).agg("\x1f".join, axis=1)
    order = sorted(set(keys), key=lambda key: hashlib.sha256(str(key).encode()).digest())
    split_of = dict.fromkeys(order, "train")
    counts = {split: round(share * len(order)) or bool(share) for split, share in layout.fractions}
    if order and sum(counts.values()) >= len(order):
        raise DataError(
            f"'{layout.path}' has {len(order)} items, too few to draw {' and '.join(counts)} from and leave some for "
            "train; add items, or set these shares to 0 (fractions)"
        )
    start = 0
    for split, count in counts.items():
        split_of |= dict.fromkeys(order[start : start + count], split)
        start += count
    return tuple(split_of[key] for key in keys)
