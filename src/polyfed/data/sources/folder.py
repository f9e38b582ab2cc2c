"""A folder as people have it: pictures with captions or in class folders, recordings, or files of texts."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated

import pyarrow as pa
from pydantic import Field

from polyfed.core.errors import DataError, nearest
from polyfed.data.annotations import (
    FILE,
    SPLIT,
    annotation_files,
    beside_split,
    listed_splits,
    read_annotations,
    split_called,
)
from polyfed.data.arrow import fingerprint_of
from polyfed.data.files import Rows
from polyfed.data.images import picture_endings
from polyfed.data.source import folder_of
from polyfed.data.tables import Share, SplitTable, StoredSource

IMAGE, AUDIO, LABEL = "image", "audio", "label"
"""Columns of pictures, of recordings in a folder without pictures, and of the names of class folders."""

_SOUNDS = frozenset(("wav",))
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_MASKS = re.compile(r"(seg(mentation)?_?)?(masks?|labels?)|annotations|segmentations?|ground_?truth|gt", re.I)
_OF_MASK = re.compile(r"[_-](mask|seg|segmentation|label|gt)s?$", re.I)  # at the end of a mask's name
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
        refuses_gaps: whether rows of pictures that are not there are an error.
    """

    path: Path
    annotations: str | None = None
    file_column: str | None = None
    split_column: str | None = None
    splits: tuple[tuple[str, tuple[str, ...]], ...] = ()
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
        unread: ending -> files of the folder that are neither pictures nor recordings, nor say anything about them.
        is_told: whether anything tells splits; else all is ``train``.
    """

    rows: pa.Table
    splits: tuple[str, ...]
    fingerprint: str
    files: str | None = None
    unused: tuple[str, ...] = ()
    without_picture: tuple[str, ...] = ()
    unread: Mapping[str, int] = field(default_factory=dict)
    is_told: bool = False

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
    pictures, column = _with_ending(layout.folder, picture_endings()), IMAGE
    if not pictures and (sounds := _with_ending(layout.folder, _SOUNDS)):
        pictures, column = sounds, AUDIO
    annotations = _annotations(layout, pictures)
    unread = _unread(layout, {*pictures, *(file.relative_to(layout.folder).as_posix() for file in annotations)})
    rows, without_picture = _rows(layout, pictures, annotations)
    table = _arrow({name: values for name, values in rows.items() if name not in (_BASE, _TOLD)}, layout)
    told = _told_splits(rows, layout)
    splits = told or ("train",) * _count(rows)
    parts = _pictures_of(rows, pictures, layout)
    if FILE not in rows:
        return FolderTable(table, splits, stamp, unread=unread, is_told=bool(told))
    for name, paths in ({column: rows[FILE]} | parts).items():
        table = _with_pictures(table, name, paths)
    unused = sorted(set(pictures).difference(rows[FILE], *parts.values()))
    return FolderTable(table, splits, stamp, column, tuple(unused), without_picture, unread, bool(told))


def _with_ending(folder: Path, endings: frozenset[str]) -> list[str]:
    return [name for name in _files_in(folder) if _ending(name) in endings]


def _ending(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _unread(layout: FolderLayout, read: set[str]) -> dict[str, int]:
    """Ending -> files of a folder that are not read; of a file that is named itself there is no folder to read."""
    names = [] if layout.path.is_file() else [name for name in _files_in(layout.folder) if name not in read]
    names = [name for name in names if not name.lower().endswith("images.txt")]
    return dict(Counter(PurePosixPath(name).suffix.lower() or "without ending" for name in names).most_common())


def _arrow(rows: Rows, layout: FolderLayout) -> pa.Table:
    columns = {}
    for name, values in rows.items():
        try:
            array = pa.array(values, from_pandas=True)
            columns[name] = array.cast(pa.string()) if pa.types.is_null(array.type) else array
        except (pa.ArrowException, UnicodeError, OverflowError) as error:
            reason = " ".join(str(error).split())
            what = "no text" if isinstance(error, UnicodeError) else "values of several types"
            raise DataError(f"'{layout.path}', column '{name}' holds {what}: {reason}") from error
    return pa.table(columns)


def _rows(layout: FolderLayout, pictures: Sequence[str], files: Sequence[Path]) -> tuple[Rows, tuple[str, ...]]:
    """The rows, and what those that are left out call pictures that are not there."""
    if files:
        rows = _together([_annotated(file, layout) for file in files])
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
        hint = nearest(file.name, [path.name for path in layout.folder.iterdir() if path.is_file()][:20])
        raise DataError(f"there is no file '{layout.annotations}' in '{layout.folder}'; {hint}")
    return [file]


def _annotated(file: Path, layout: FolderLayout) -> Rows:
    rows = read_annotations(file, layout.file_column, layout.folder)
    base = file.parent.relative_to(layout.folder).as_posix()
    told = file.stem if base in (".", "annotations") else f"{base} {file.stem}"
    count = _count(rows)
    return rows | {_BASE: [base] * count, _TOLD: [told] * count}


def _count(rows: Rows) -> int:
    return len(next(iter(rows.values())))


def _together(parts: Sequence[Rows]) -> Rows:
    """The rows of several files; a column that is of texts in one is of texts in all, as numbers are written."""
    columns = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part.get(name) or [None] * _count(part) for part in parts]
        kinds = [{*map(type, column)} - {type(None)} for column in values]
        if {str} in kinds and all(kind == {str} or kind <= {int, float} for kind in kinds):
            values = [[value if value is None else str(value) for value in column] for column in values]
        columns[name] = [value for column in values for value in column]
    return columns


# ---- pictures and their rows


def _matched(rows: Rows, pictures: Sequence[str], layout: FolderLayout, file: Path) -> tuple[Rows, tuple[str, ...]]:
    """Rows with the paths of pictures in place of what the file calls them, and what it calls those not there."""
    if FILE not in rows:
        columns = ", ".join(name for name in rows if name not in (_BASE, _TOLD))
        remedy = "such as file_name; name it in file_column (--file-column)"
        raise DataError(f"'{file}' has no column of file names, {remedy}: {columns}")
    place = _finder(pictures)
    paths = [place(str(name), base) for name, base in zip(rows[FILE], rows[_BASE], strict=True)]
    missing = [str(name) for name, path in zip(rows[FILE], paths, strict=True) if path is None]
    told = _check_gaps(missing, len(paths), layout, file) if missing else ()
    kept = [number for number, path in enumerate(paths) if path is not None]
    return {name: [values[number] for number in kept] for name, values in (rows | {FILE: paths}).items()}, told


def _check_gaps(missing: Sequence[str], rows: int, layout: FolderLayout, file: Path) -> tuple[str, ...]:
    """What rows call pictures that are not there, or not of a kind that is read."""
    there = {PurePosixPath(name).name for name in _files_in(layout.folder)}
    hints = dict.fromkeys(missing, "")
    for name in (name for name in hints if PurePosixPath(name.replace("\\", "/")).name in there):
        hints[name] = f" (there, but {PurePosixPath(name).suffix} is not read; convert it)"
    first, hint = max(hints.items(), key=lambda entry: bool(entry[1]))
    if len(missing) == rows:
        raise DataError(f"'{file}': no picture called '{first}', nor any other of its rows, is in the folder{hint}")
    if layout.refuses_gaps:
        count = f"names {len(hints)} pictures that are not in '{layout.folder}', first '{first}'{hint}"
        raise DataError(
            f"'{file}' {count}; add them, or leave these rows out (incomplete: leave_out), as polyfed prepare does"
        )
    return tuple(name + hint for name, hint in hints.items())


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
        wanted = _below(base, name)
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


def _joined(rows: Rows) -> Rows:
    """One row a picture; what differs among its rows becomes a list, without the missing ones."""
    places: dict[str, list[int]] = {}
    for number, path in enumerate(rows[FILE]):
        places.setdefault(path, []).append(number)
    if len(places) == _count(rows):
        return rows
    joined: Rows = {FILE: list(places)}
    for name in (name for name in rows if name != FILE):
        groups = [[rows[name][number] for number in numbers] for numbers in places.values()]
        differs = any(isinstance(group[0], list) or any(value != group[0] for value in group) for group in groups)
        joined[name] = [[value for value in group if value is not None] if differs else group[0] for group in groups]
    return joined


def _class_folders(pictures: Sequence[str], layout: FolderLayout) -> Rows:
    """Pictures with the innermost folder above them, but for that of the split, as label."""
    level = _split_level(pictures, layout, needs_class=True)
    labels = []
    for path in pictures:
        folders = _folders(path)
        classes = [name for place, name in enumerate(folders) if place != level]
        if not classes:
            named = f" ('{folders[level]}' is taken for a split)" if level is not None and folders else ""
            remedy = "add a captions.csv (columns file_name, caption), or put them into folders of their classes"
            raise DataError(f"'{layout.folder}' has pictures alone, such as '{path}'{named}; {remedy}")
        labels.append(classes[-1])
    _refuse_masks(pictures, labels, layout)
    return {FILE: list(pictures), LABEL: labels}


def _refuse_masks(pictures: Sequence[str], labels: Sequence[str], layout: FolderLayout) -> None:
    """Raise DataError if what seems a class are masks of pictures that are called as they are."""
    stems: dict[str, set[str]] = {}
    for path, label in zip(pictures, labels, strict=True):
        stems.setdefault(label, set()).add(_OF_MASK.sub("", PurePosixPath(path).stem))
    for label in filter(_MASKS.fullmatch, stems):
        if other := next((one for one in stems if one != label and stems[one] == stems[label]), None):
            names = f"'{layout.folder}': pictures of '{label}' are called as those of '{other}'"
            raise DataError(f"{names}; name masks in a metadata.csv (columns file_name, mask), or rename the class")


def _folders(path: str) -> tuple[str, ...]:
    return PurePosixPath(path).parts[:-1]


def _split_level(pictures: Sequence[str], layout: FolderLayout, needs_class: bool) -> int | None:
    """The outermost level of folders of which each is a split's, of at least two; None if there is none.

    Folders such as ``valid`` and ``test_strip``, which say more than a split, are classes where there are no others.
    """
    paths = [_folders(path) for path in pictures]
    for level in range(min(map(len, paths), default=0)):
        names = {folders[level] for folders in paths}
        splits = {layout.split_called(name) for name in names}
        if None not in splits and len(splits) > 1:
            are_classes = needs_class and not layout.splits and any(len(folders) == 1 for folders in paths)
            return None if are_classes and len(set(map(beside_split, names))) > 1 else level
    return None


def _with_pictures(table: pa.Table, column: str, names: Sequence[str | None]) -> pa.Table:
    paths = pa.array(names, pa.string())
    image = pa.StructArray.from_arrays(
        [pa.nulls(len(paths), pa.binary()), paths], fields=list(_IMAGE), mask=paths.is_null()
    )
    if column in table.column_names:
        table = table.drop_columns([column])
    return table.append_column(column, image)


def _pictures_of(rows: Rows, pictures: Sequence[str], layout: FolderLayout) -> dict[str, list[str | None]]:
    """Column of paths of other pictures of the folder, such as masks -> these.

    Raises:
        DataError: some of its pictures are not there.
    """
    found: dict[str, list[str | None]] = {}
    there, bases = set(pictures), rows.get(_BASE) or [""] * _count(rows)
    for name in rows.keys() - {IMAGE, FILE, _BASE, _TOLD} if FILE in rows else ():
        known = [value for value in rows[name] if value is not None]
        if not known or not all(isinstance(value, str) and _ending(value) in picture_endings() for value in known):
            continue
        paths = [value and _below(base, value) for value, base in zip(rows[name], bases, strict=True)]
        if there.isdisjoint(paths) or paths == rows[FILE]:
            continue
        if missing := set(paths) - there - {None}:
            raise DataError(f"'{layout.path}', column '{name}': there is no picture '{min(missing)}'; add it")
        found[name] = paths
    return dict(sorted(found.items()))


def _below(base: str, name: str) -> str:
    return PurePosixPath(base, name.strip().replace("\\", "/")).as_posix()


# ---- splits


def _told_splits(rows: Rows, layout: FolderLayout) -> tuple[str, ...]:
    """Split of each row, by a column, by files or folders if these tell at least two, or by lists; else nothing."""
    column = layout.split_column or SPLIT
    if column in rows:
        return tuple(_of_column(rows[column], column, layout))
    if layout.split_column is not None:
        names = [name for name in rows if name not in (_BASE, _TOLD)]
        raise DataError(f"'{layout.folder}': no column '{column}' (split_column); {nearest(column, names)}")
    for told in _told(rows, layout):
        if None not in told and len(set(told)) > 1:
            return tuple(str(split) for split in told)
    return ()


def _of_column(values: Iterable[object], column: str, layout: FolderLayout) -> Iterable[str]:
    for value in values:
        split = layout.split_called(str(value))
        if split is None:
            named = "; ".join(f"{ours}: {', '.join(names)}" for ours, names in layout.splits)
            valid = named or "train, validation, test"
            what = f"'{value}' is none of the splits ({valid}); say in `splits` what it belongs to"
            raise DataError(f"'{layout.folder}', column '{column}': {what}")
        yield split


def _told(rows: Rows, layout: FolderLayout) -> Iterable[list[str | None]]:
    if _TOLD in rows:
        yield [layout.split_called(name) for name in rows[_TOLD]]
    if FILE in rows:
        level = _split_level(rows[FILE], layout, needs_class=_TOLD not in rows)
        yield [None if level is None else layout.split_called(_folders(path)[level]) for path in rows[FILE]]
        listed: Mapping[str, str] = listed_splits(layout.folder)
        yield [listed.get(PurePosixPath(path).name) for path in rows[FILE]]


class Folder(StoredSource):
    """A folder of pictures with captions or labels, of pictures in class folders, or of texts, without conversion.

    Found without being told: ``metadata.csv`` or ``.jsonl`` (the *imagefolder* of Hugging Face), ``captions.csv``,
    ``.tsv``, ``.jsonl`` or ``.txt``, ``labels.csv``, annotations of COCO, Karpathy's JSON, the ``.token`` and
    ``results.csv`` of Flickr8k and Flickr30k; class folders, with or without folders of splits above; without pictures
    ``.csv``, ``.tsv``, ``.jsonl`` and ``.txt`` (a text a line). Rows of one picture become one item, with lists of what
    differs among them.

    Without pictures WAV files are read as these are. Columns are those of the file, with ``image`` for the picture or
    ``audio`` for the recording, ``file_name`` for its path, ``label`` for its class
    folder, ``captions`` for captions of COCO, Karpathy and Flickr, ``text`` for lines. Splits are told by a column, by
    names of files or folders, by Flickr8k's lists; else ``fractions`` are drawn, the same on every machine.
    """

    path: str = Field(description="the folder, or one file of texts: absolute, or relative to the data folder")
    annotations: str | None = Field(
        default=None, description="file with captions, labels or texts, relative to the folder; null: found by its name"
    )
    file_column: str | None = Field(
        default=None,
        description="column with pictures' file names; null: one of the usual names (file_name, image, ...)",
    )
    split_column: str | None = Field(
        default=None, description="column that says the split; null: `split`, if there is one"
    )
    splits: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(
        default_factory=dict, description="our split -> values of the column, or names of folders, that it is made of"
    )
    fractions: dict[str, Share] = Field(
        default={"validation": 0.1, "test": 0.1},
        description="share of each split where nothing tells; the rest is train",
    )

    def rows(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """See ``TableSource``; shares are drawn only where nothing tells splits."""
        is_told = folder_table(self.layout(name, data_dir)).is_told
        return (self.table if is_told else super().rows)(split, name=name, data_dir=data_dir)

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The rows of one split; lists the folder and reads its annotations."""
        layout = self.layout(name, data_dir)
        content = folder_table(layout)
        rows = content.of(split)
        if not rows.num_rows:
            place = f"source '{name}', path '{self.path}'"
            hint = f"{nearest(split, set(content.splits))}; or give it a share in `fractions`"
            raise DataError(f"{place}: no split '{split}'; {hint}")
        return SplitTable(
            read=rows.column,
            count=lambda: rows.num_rows,
            schema=rows.schema,
            where=Path(self.path).as_posix(),
            split=split,
            fingerprint=content.fingerprint,
            ids=FILE if content.files else None,
            everywhere=content.rows.column,
            folder=layout.folder,
        )

    def layout(self, name: str, data_dir: Path | None) -> FolderLayout:
        """What the settings say, with the folder found.

        Raises:
            DataError: it is not there.
        """
        given = Path(self.path).expanduser()
        full_path = given if data_dir is None else data_dir / given
        return FolderLayout(
            path=full_path if full_path.is_file() else folder_of(self.path, name, data_dir),
            annotations=self.annotations,
            file_column=self.file_column,
            split_column=self.split_column,
            splits=tuple(self.splits.items()),
            refuses_gaps=self.incomplete == "refuse",
        )
