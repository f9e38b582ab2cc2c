"""A folder as people have it: images with captions or in class folders, recordings, or files of texts."""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import pyarrow as pa
from pydantic import Field

from polyfed.core.errors import DataError, nearest
from polyfed.data.arrow import file_key
from polyfed.data.dialects import Rows, joined
from polyfed.data.files import (
    CAPTIONS,
    FILE,
    SPLIT,
    annotation_files,
    beside_split,
    lines_of,
    read_annotations,
    split_called,
    text_of,
)
from polyfed.data.images import has_remedy, image_endings, remedy_of
from polyfed.data.source import Count, LeftOut, path_of
from polyfed.data.tables import Reading, SplitTable, StoredSource

IMAGE, AUDIO, LABEL, MASK = "image", "audio", "label", "mask"
"""Columns of images, of recordings in a folder without images, of names of class folders, and of masks."""

_SOUNDS = frozenset(("wav",))
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_MASKS = re.compile(r"(seg(mentation)?_?)?(masks?|labels?)|annotations|segmentations?|ground_?truth|gt", re.I)
_OF_MASK = re.compile(r"[_-](mask|seg|segmentation|label|gt)s?$", re.I)  # at the end of a mask's name
_Stem = tuple[tuple[str, ...], tuple[str, ...], str]  # folders above and below that of masks or images, and a name
_NUMBERS = re.compile(r"[-+.,\deE\s]*")
_BASE, _TOLD = "_base", "_told"  # folder that names are relative to, and what a file is called, while rows are read


class FolderReading(Reading):
    """How texts and cells of files are read."""

    encoding: str | None = Field(default=None, description="of texts, such as windows-1251; null: told by the files")
    decimal: Literal[".", ","] | None = Field(default=None, description="sign before decimals; null: told by the file")


class Folder(StoredSource):
    """A folder of images with captions or labels, of images in class folders, or of texts, without conversion.

    Found without being told: ``metadata.csv`` or ``.jsonl`` (the *imagefolder* of Hugging Face), ``captions.csv``,
    ``.tsv``, ``.jsonl`` or ``.txt``, ``labels.csv``, annotations of COCO, Karpathy's JSON, the
    ``results.csv`` of Flickr30k; class folders, or ``images`` and ``masks`` with equal names, with or
    without folders of splits above; ``1.txt`` with captions of ``1.jpg`` beside it, a line each; without images
    ``.csv``, ``.tsv``, ``.jsonl`` and ``.txt`` (a text a line). Rows of one image become one item, with lists of what
    differs among them.

    Without images WAV files are read as these are. Columns are those of the file, with ``image`` for the image or
    ``audio`` for the recording, ``file_name`` for its path, ``label`` for its class folder, ``mask`` for its mask,
    ``captions`` for those of COCO, Karpathy and files beside images, ``text`` for lines. Splits are told by a
    column or by names of files or folders; else ``fractions`` are drawn, the same on every machine.
    """

    path: str = Field(description="the folder, or one file of texts: absolute, or relative to the data folder")
    annotations: str | None = Field(
        default=None, description="file with captions, labels or texts, relative to the folder; null: found by its name"
    )
    file_column: str | None = Field(
        default=None,
        description="column with images' file names; null: found by its name (file_name, image, ...) or its content",
    )
    split_column: str | None = Field(default=None, description="column that says the split; null: `split`, if any")
    splits: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(
        default_factory=dict, description="our split -> values of the column, or names of folders, that it is made of"
    )
    fractions: dict[str, float | tuple[str, ...]] = Field(
        default={"validation": 0.1, "test": 0.1},
        description="share of each split where nothing tells, or of those that are missing where others are told, if "
        "it names no other; the rest is train; together: as for all sources",
    )
    reading: FolderReading = Field(default=FolderReading(), description="how texts and cells are read")

    def rows(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """See ``TableSource``; shares are drawn where nothing tells splits, or for those that are missing alone."""
        content = self.content(name, data_dir)
        is_told = content.is_told and not self.shares.keys().isdisjoint(content.splits)
        return (self.table if is_told or not self.shares else super().rows)(split, name=name, data_dir=data_dir)

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The rows of one split; lists the folder and reads its annotations."""
        content = self.content(name, data_dir)
        rows = content.rows.filter(pa.array([one == split for one in content.splits]))
        if not rows.num_rows:
            place = f"source '{name}', path '{self.path}'"
            hint = f"{nearest(split, set(content.splits))}; or give it a share in `fractions`"
            raise DataError(f"{place}: no split '{split}'; {hint}")
        return SplitTable.of_parts(
            rows,
            lambda: [content.rows],
            where=Path(self.path).as_posix(),
            split=split,
            ids=FILE if content.files else None,
            folder=content.folder,
            scope=str(content.folder.resolve()),
        )

    def content(self, name: str = "folder", data_dir: Path | None = None) -> FolderTable:
        """All rows; read once a process while no file of the folder changes.

        Raises:
            DataError: there is nothing to read, or what there is does not fit together.
        """
        path = path_of(self.path, name, data_dir, may_be_file=True)
        folder = path.parent if path.is_file() else path
        return _read(self.model_dump_json(), path, folder, _files_in(folder))

    def account(self, *, name: str, data_dir: Path | None, used: Collection[str] = ()) -> tuple[Count, ...]:
        """See ``Source``; of files, and of rows of annotations, too."""
        return (*self.content(name, data_dir).counts, *super().account(name=name, data_dir=data_dir, used=used))

    @property
    def split_columns(self) -> tuple[str, ...]:
        """See ``TableSource``."""
        return (*super().split_columns, FILE, self.split_column or SPLIT)

    def split_called(self, name: str) -> str | None:
        """Our split that a name means; None if it means none."""
        if self.splits:
            return next((split for split, names in self.splits.items() if name in names), None)
        return split_called(name)


@dataclass(frozen=True)
class FolderTable:
    """One row an item.

    Attributes:
        folder: in which all files lie.
        rows: columns of the annotations, and ``image`` (or ``audio``), ``file_name``, ``label`` of files.
        splits: split of each row.
        files: column of the images or recordings that the rows name, ``image`` or ``audio``; None: they name none.
        unused: images of the folder that no row names, and that have no captions beside them.
        without_image: what rows call images that are not there, where these rows are left out; captions of none.
        unread: ending -> files of the folder that are neither images nor recordings, nor say anything about them.
        counts: of files, and of rows of annotations.
        notes: how each file of annotations is written, and what of it is replaced.
        is_told: whether anything tells splits; else all is ``train``.
    """

    folder: Path
    rows: pa.Table
    splits: tuple[str, ...]
    files: str | None = None
    unused: tuple[str, ...] = ()
    without_image: tuple[str, ...] = ()
    unread: Mapping[str, int] = field(default_factory=dict)
    counts: tuple[Count, ...] = ()
    notes: tuple[str, ...] = ()
    is_told: bool = False


class _Files(NamedTuple):
    """Files of a folder.

    Attributes:
        keys: path below the folder and ``file_key`` of every file that is looked at, in the order of paths.
        hidden: paths of files that are hidden, or in hidden folders.
        systems: paths of files that systems make for themselves, such as thumbnails.
    """

    keys: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]
    systems: tuple[str, ...]


# of Synology, QNAP, Windows, macOS and Linux; hidden ones begin with a point
_OF_SYSTEMS = re.compile(
    r"@.*|#(recycle|snapshot)|\$recycle\.bin|~\$.*|__macosx|lost\+found|system volume information|(eh)?thumbs\.db|"
    r"desktop\.ini|_?thumb(nail)?s?",
    re.I,
)


def _files_in(folder: Path) -> _Files:
    stamps, hidden, systems = dict[str, str](), list[str](), list[str]()
    for top, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(top, name) for name in names):
            name = path.relative_to(folder).as_posix()
            parts = PurePosixPath(name).parts
            if any(part.startswith(".") for part in parts):
                hidden.append(name)
                continue
            if any(_OF_SYSTEMS.fullmatch(part) for part in parts):
                systems.append(name)
                continue
            try:
                name.encode()
                stamps[name] = file_key(path)
            except UnicodeEncodeError as error:
                raise DataError(f"the name of {name!a} in '{folder}' is not UTF-8; rename it") from error
            except OSError as error:
                raise DataError(f"'{path}' cannot be read ({error.strerror}); mend the link or remove it") from error
    return _Files(tuple(sorted(stamps.items())), tuple(sorted(hidden)), tuple(sorted(systems)))


@lru_cache(maxsize=8)
def _read(settings: str, path: Path, folder: Path, files: _Files) -> FolderTable:
    return _Reader(Folder.model_validate_json(settings), path, folder, files).table()


class _Reader:
    """Makes a table of a folder.

    Attributes:
        settings: what the source was told.
        path: the folder, or one file of it.
        folder: the folder.
        files: all of it.
        names: of those that are looked at.
        images: those that are images; of a folder without images, recordings.
        column: what these are called in the table.
        rows: count of the rows of annotations, once they are read.
        notes: lines on files of annotations, likewise.
    """

    def __init__(self, settings: Folder, path: Path, folder: Path, files: _Files) -> None:
        self.settings, self.path, self.folder, self.files = settings, path, folder, files
        self.names, self.rows = tuple(name for name, _ in files.keys), list[Count]()
        self.notes = list[str]()
        self.images, self.column = [name for name in self.names if _ending(name) in image_endings()], IMAGE
        if not self.images and (sounds := [name for name in self.names if _ending(name) in _SOUNDS]):
            self.images, self.column = sounds, AUDIO

    def table(self) -> FolderTable:
        annotations = self._annotations()
        beside = {} if annotations else self._captions_beside()
        rows, without_image = self._beside(beside) if beside else self._rows(annotations)
        table = self._arrow({name: values for name, values in rows.items() if name not in (_BASE, _TOLD)})
        told = self._told_splits(rows)
        splits = told or ("train",) * _count(rows)
        texts = [name for name in self.names if beside and _ending(name) == "txt"]
        read = [file.relative_to(self.folder).as_posix() for file in annotations]
        unread = self._unread({*self.images, *read, *texts})
        if FILE not in rows:
            counts = self._counts({*read}, unread=unread)
            notes = tuple(self.notes)
            return FolderTable(
                self.folder, table, splits, unread=unread, counts=counts, notes=notes, is_told=bool(told)
            )
        others = self._other_images(rows)
        if self.column in rows:
            self.notes.append(f"column '{self.column}' names no files that '{FILE}' does not: it is replaced by them")
        for name, paths in ({self.column: rows[FILE]} | others).items():
            table = _with_images(table, name, paths)
        unused = tuple(sorted(set(self.images).difference(rows[FILE], *others.values())))
        lonely = without_image if beside else ()
        named = {*read, *texts, *self.images} - {*unused, *lonely}
        counts = self._counts(named, unused, lonely, unread)
        left_out = unused, without_image, unread, counts, tuple(self.notes)
        return FolderTable(self.folder, table, splits, self.column, *left_out, is_told=bool(told))

    def _counts(
        self,
        read: set[str],
        unused: Sequence[str] = (),
        lonely: Sequence[str] = (),
        unread: Mapping[str, int] = MappingProxyType({}),
    ) -> tuple[Count, ...]:
        """Counts of files and rows; of a file that is named itself, and the images that its rows may name."""
        is_folder = not self.path.is_file()
        found = len(self.names) if is_folder else 1 + (len(self.images) if {*self.images} & read or unused else 0)
        left_out = [
            LeftOut(f"{self.column} files that no row or caption names", len(unused), next(iter(unused), "")),
            LeftOut("caption files without an image", len(lonely), next(iter(lonely), "")),
            *(
                LeftOut(f"{ending} files, which are not read ({remedy_of(ending)})", number)
                for ending, number in unread.items()
            ),
        ]
        if is_folder:
            hidden, systems = self.files.hidden, self.files.systems
            found += len(hidden) + len(systems)
            left_out += [LeftOut("hidden files", len(hidden), next(iter(hidden), ""))]
            left_out += [LeftOut("files of operating systems", len(systems), next(iter(systems), ""))]
        return (Count.of("files", found, len(read), left_out), *self.rows)

    def _annotations(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        if self.settings.annotations is None:
            return annotation_files(self.folder, bool(self.images))
        file = self.folder / self.settings.annotations
        if not file.is_file():
            hint = nearest(file.name, [path.name for path in self.folder.iterdir() if path.is_file()][:20])
            raise DataError(f"there is no file '{self.settings.annotations}' in '{self.folder}'; {hint}")
        return [file]

    def _unread(self, read: set[str]) -> dict[str, int]:
        """Ending -> files of a folder that are not read; of a file that is named itself there is no folder to read."""
        names = [] if self.path.is_file() else [name for name in self.names if name not in read]
        return dict(Counter(PurePosixPath(name).suffix.lower() or "without ending" for name in names).most_common())

    def _arrow(self, rows: Rows) -> pa.Table:
        columns = {}
        for name, values in rows.items():
            try:
                array = pa.array(values, from_pandas=True)
                columns[name] = array.cast(pa.string()) if pa.types.is_null(array.type) else array
            except (pa.ArrowException, UnicodeError, OverflowError) as error:
                reason = " ".join(str(error).split())
                what = "no text" if isinstance(error, UnicodeError) else "values of several types"
                raise DataError(f"'{self.path}', column '{name}' holds {what}: {reason}") from error
        return pa.table(columns)

    def _rows(self, files: Sequence[Path]) -> tuple[Rows, tuple[str, ...]]:
        """The rows, and what those that are left out call images that are not there."""
        if files:
            rows = _together([self._annotated(file) for file in files])
            self.rows = [Count("rows", _count(rows), _count(rows))]
            # a file that is named itself may hold texts beside somebody's images
            is_of_images = FILE in rows or (self.images and not self.path.is_file())
            if not is_of_images:
                return rows, ()
            matched, missing = self._matched(rows, files[0])
            return _joined(matched), missing
        if not self.images:
            if first := next((name for name in self.names if has_remedy(name)), None):
                ending = PurePosixPath(first).suffix
                number = sum(name.endswith(ending) for name in self.names)
                what = f"'{self.folder}' has no image or recording that is read, but {number} {ending} files"
                raise DataError(f"{what}, such as '{first}': {remedy_of(first)}")
            wanted = "images or WAV files, captions.csv, metadata.csv, train.csv, texts.txt"
            raise DataError(f"there is nothing to read in '{self.folder}'; it should hold {wanted}, or the like")
        return self._class_folders(), ()

    def _annotated(self, file: Path) -> Rows:
        settings = self.settings
        rows, dialect = read_annotations(
            *(file, settings.file_column, self.folder),
            files=self.images,
            encoding=settings.reading.encoding,
            decimal=settings.reading.decimal,
        )
        self.notes.append(f"{file.name}: {dialect}")
        base = file.parent.relative_to(self.folder).as_posix()
        told = file.stem if base in (".", "annotations") else f"{base} {file.stem}"
        count = _count(rows)
        return rows | {_BASE: [base] * count, _TOLD: [told] * count}

    # ---- images and their rows

    def _captions_beside(self) -> dict[str, list[str]]:
        """Image -> lines of the file of text beside it that is called alike, if half of them have one."""
        files = {_stem(name): self.folder / name for name in self.names if _ending(name) == "txt"}
        texts = {
            name: text_of(files[stem], self.folder, self.settings.reading.encoding)
            for name in self.images
            if (stem := _stem(name)) in files
        }
        lines = {name: [line.strip() for line in lines_of(text) if line.strip()] for name, text in texts.items()}
        captions = {name: own for name, own in lines.items() if own}
        # boxes of objects lie beside images too, and so may a note
        are_numbers = all(_NUMBERS.fullmatch(line) for own in captions.values() for line in own)
        return {} if are_numbers or 2 * len(captions) < len(self.images) else captions

    def _beside(self, captions: Mapping[str, Sequence[str]]) -> tuple[Rows, tuple[str, ...]]:
        """Rows of images with captions beside them, and files of captions beside none."""
        pairs = [(name, line) for name, lines in captions.items() for line in lines]
        rows: Rows = {FILE: [name for name, _ in pairs], CAPTIONS: [line for _, line in pairs]}
        with contextlib.suppress(DataError):  # they are in no class folders
            folders = self._class_folders()
            for column in folders.keys() - {FILE}:  # classes, or masks
                value_of = dict(zip(folders[FILE], folders[column], strict=True))
                rows[column] = [value_of[name] for name in rows[FILE]]
        known = set(map(_stem, self.images))
        return _joined(rows), tuple(name for name in self.names if _ending(name) == "txt" and _stem(name) not in known)

    def _matched(self, rows: Rows, file: Path) -> tuple[Rows, tuple[str, ...]]:
        """Rows with the paths of images in place of what the file calls them, and what it calls those not there."""
        if FILE not in rows:
            columns = ", ".join(name for name in rows if name not in (_BASE, _TOLD))
            remedy = "such as file_name; name it in file_column (--file-column)"
            raise DataError(f"'{file}' has no column of file names, {remedy}: {columns}")
        find = _finder(self.images)
        paths = [find(str(name), base) for name, base in zip(rows[FILE], rows[_BASE], strict=True)]
        missing = [str(name) for name, path in zip(rows[FILE], paths, strict=True) if path is None]
        told = self._missing_images(missing, len(paths), file) if missing else ()
        kept = [number for number, path in enumerate(paths) if path is not None]
        reason = LeftOut("whose image is missing or not read", len(missing), next(iter(told), ""))
        self.rows = [Count.of("rows", len(paths), len(kept), [reason])]
        return {name: [values[number] for number in kept] for name, values in (rows | {FILE: paths}).items()}, told

    def _missing_images(self, missing: Sequence[str], rows: int, file: Path) -> tuple[str, ...]:
        """What rows call images that are not there, or not of a type that is read."""
        there = {PurePosixPath(name).name for name in self.names}
        hints = dict.fromkeys(missing, "")
        for name in (name for name in hints if PurePosixPath(name.replace("\\", "/")).name in there):
            hints[name] = f" (there, but {PurePosixPath(name).suffix} is not read: {remedy_of(name)})"
        first, hint = max(hints.items(), key=lambda entry: bool(entry[1]))
        if len(missing) == rows:
            raise DataError(f"'{file}': no image called '{first}', nor any other of its rows, is in the folder{hint}")
        if self.settings.incomplete == "refuse":
            count = f"names {len(hints)} images that are not in '{self.folder}', first '{first}'{hint}"
            raise DataError(
                f"'{file}' {count}; add them, or leave these rows out (incomplete: leave_out), as polyfed prepare does"
            )
        return tuple(name + hint for name, hint in hints.items())

    def _class_folders(self) -> Rows:
        """Images with the innermost folder above them, but for that of the split, as label; or with their masks."""
        if masks := self._masks():
            return {FILE: list(masks), MASK: list(masks.values())}
        level = self._split_level(self.images, needs_class=True)
        labels = []
        for path in self.images:
            folders = _folders(path)
            classes = [name for depth, name in enumerate(folders) if depth != level]
            if not classes:
                named = f" ('{folders[level]}' is taken for a split)" if level is not None and folders else ""
                remedy = "add a captions.csv (file_name, caption), a 1.txt for each 1.jpg, or folders of their classes"
                raise DataError(f"'{self.folder}' has images alone, such as '{path}'{named}; {remedy}")
            labels.append(classes[-1])
        return {FILE: list(self.images), LABEL: labels}

    def _masks(self) -> dict[str, str]:
        """Image -> its mask, where a folder of masks stands beside one of images that are called as they are.

        Raises:
            DataError: half of the masks are called as images, but not every one, or an image lacks its own.
        """
        masks, images = dict[_Stem, str](), dict[_Stem, list[str]]()
        for path in self.images:
            folders, stem = _folders(path), PurePosixPath(path).stem
            level = next((level for level, name in enumerate(folders) if is_mask(name)), None)
            if level is None:
                for level in range(len(folders)):
                    images.setdefault((folders[:level], folders[level + 1 :], stem), []).append(path)
            else:
                masks[folders[:level], folders[level + 1 :], _OF_MASK.sub("", stem)] = path
        shared = [place for place in masks if place in images]
        if 2 * len(shared) < max(len(masks), 1):
            return {}
        paired = {images[place][0]: masks[place] for place in shared if len(images[place]) == 1}
        if odd := sorted({*self.images} - paired.keys() - {*paired.values()}):
            what = f"'{self.folder}': masks are called as images, such as '{masks[shared[0]]}', but not '{odd[0]}'"
            remedy = "add what it lacks, name masks in a metadata.csv (columns file_name, mask), or rename the class"
            raise DataError(f"{what}; {remedy}")
        return paired

    def _other_images(self, rows: Rows) -> dict[str, list[str | None]]:
        """Column of paths of other images of the folder, such as masks -> these.

        Raises:
            DataError: some of its images are not there.
        """
        columns: dict[str, list[str | None]] = {}
        there, bases = set(self.images), rows.get(_BASE) or [""] * _count(rows)
        for name in rows.keys() - {IMAGE, FILE, _BASE, _TOLD}:
            known = [value for value in rows[name] if value is not None]
            if not known or not all(isinstance(value, str) and _ending(value) in image_endings() for value in known):
                continue
            paths = [value and _below(base, value) for value, base in zip(rows[name], bases, strict=True)]
            if (there.isdisjoint(paths) and not is_mask(name)) or paths == rows[FILE]:
                continue
            if missing := set(paths) - there - {None}:
                what = f"'{self.path}', column '{name}': there is no image '{min(missing)}'"
                raise DataError(f"{what}; write paths from the folder on")
            columns[name] = paths
        return dict(sorted(columns.items()))

    # ---- splits

    def _told_splits(self, rows: Rows) -> tuple[str, ...]:
        """Split of each row, by a column, or by files or folders with at least two splits; else nothing."""
        column = self.settings.split_column or SPLIT
        if column in rows:
            return tuple(self._split_of(value, column) for value in rows[column])
        if self.settings.split_column is not None:
            names = [name for name in rows if name not in (_BASE, _TOLD)]
            raise DataError(f"'{self.folder}': no column '{column}' (split_column); {nearest(column, names)}")
        for told in self._tellings(rows):
            if None not in told and len(set(told)) > 1:
                return tuple(str(split) for split in told)
        return ()

    def _split_of(self, value: object, column: str) -> str:
        split = self.settings.split_called(str(value))
        if split is None:
            named = "; ".join(f"{ours}: {', '.join(names)}" for ours, names in self.settings.splits.items())
            valid = named or "train, validation, test"
            what = f"'{value}' is none of the splits ({valid}); say in `splits` what it belongs to"
            raise DataError(f"'{self.folder}', column '{column}': {what}")
        return split

    def _tellings(self, rows: Rows) -> Iterable[list[str | None]]:
        if _TOLD in rows:
            yield [self.settings.split_called(name) for name in rows[_TOLD]]
        if FILE in rows:
            level = self._split_level(rows[FILE], needs_class=_TOLD not in rows)
            yield [None if level is None else self.settings.split_called(_folders(path)[level]) for path in rows[FILE]]

    def _split_level(self, images: Sequence[str], needs_class: bool) -> int | None:
        """The outermost level of folders of which each is a split's, of at least two; None if there is none.

        Folders such as ``valid`` and ``test_strip``, which say more than a split, are classes if there are no others.
        """
        paths = [_folders(path) for path in images]
        for level in range(min(map(len, paths), default=0)):
            names = {folders[level] for folders in paths}
            splits = {self.settings.split_called(name) for name in names}
            if None not in splits and len(splits) > 1:
                are_classes = needs_class and not self.settings.splits and any(len(folders) == 1 for folders in paths)
                return None if are_classes and len(set(map(beside_split, names))) > 1 else level
        return None


def is_mask(name: str) -> bool:
    """Whether a folder or a column is called as masks are."""
    return _MASKS.fullmatch(name) is not None


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _ending(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _count(rows: Rows) -> int:
    return len(next(iter(rows.values())))


def _together(parts: Sequence[Rows]) -> Rows:
    """The rows of several files; a column that is of texts in one is of texts in all, as numbers are written."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: joined([part.get(name) or [None] * _count(part) for part in parts]) for name in names}


def _finder(images: Sequence[str]) -> Callable[[str, str], str | None]:
    """Finds an image by its path, by its name in whatever folder, or by its name without ending.

    As systems write names in several ways, accents are composed and endings in small letters before names are compared;
    a name that is letter by letter that of a file is that file's all the same.
    """
    paths = set(images)
    by_name: dict[str, list[str]] = {}
    for path in images:
        pure = _folded(path)
        for name in {str(pure), pure.name, pure.stem}:
            by_name.setdefault(name, []).append(path)

    def find(name: str, base: str) -> str | None:
        wanted = _below(base, name)
        if wanted in paths:
            return wanted
        folded = _folded(wanted)
        candidates = by_name.get(str(folded)) or by_name.get(folded.name, [])
        if len(candidates) > 1:
            raise DataError(f"'{name}' may be '{candidates[0]}' or '{candidates[1]}'; write its path below the folder")
        return candidates[0] if candidates else None

    return find


def _folded(path: str) -> PurePosixPath:
    pure = PurePosixPath(unicodedata.normalize("NFC", path))
    return pure.with_suffix(pure.suffix.lower()) if pure.suffix else pure


def _joined(rows: Rows) -> Rows:
    """One row per image; what differs among its rows becomes a list, without the missing ones."""
    numbers_of: dict[str, list[int]] = {}
    for number, path in enumerate(rows[FILE]):
        numbers_of.setdefault(path, []).append(number)
    if len(numbers_of) == _count(rows):
        return rows
    joined: Rows = {FILE: list(numbers_of)}
    for name in (name for name in rows if name != FILE):
        groups = [[rows[name][number] for number in numbers] for numbers in numbers_of.values()]
        differs = any(isinstance(group[0], list) or any(value != group[0] for value in group) for group in groups)
        joined[name] = [[value for value in group if value is not None] if differs else group[0] for group in groups]
    return joined


def _folders(path: str) -> tuple[str, ...]:
    return PurePosixPath(path).parts[:-1]


def _with_images(table: pa.Table, column: str, names: Sequence[str | None]) -> pa.Table:
    paths = pa.array(names, pa.string())
    image = pa.StructArray.from_arrays(
        [pa.nulls(len(paths), pa.binary()), paths], fields=list(_IMAGE), mask=paths.is_null()
    )
    if column in table.column_names:
        table = table.drop_columns([column])
    return table.append_column(column, image)


def _below(base: str, name: str) -> str:
    return PurePosixPath(base, name.strip().replace("\\", "/")).as_posix()
