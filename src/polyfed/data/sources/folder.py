"""Folders of images with captions or in class folders, of recordings, or of texts, in common layouts."""

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
from typing import Annotated, Any, Literal, NamedTuple

import pyarrow as pa
from pydantic import Field

from polyfed.core.errors import DataError, nearest
from polyfed.data import arrow
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
    text_and_dialect,
)
from polyfed.data.images import has_remedy, image_endings, remedy_of
from polyfed.data.source import Count, LeftOut, path_of
from polyfed.data.tables import Reading, SplitTable, StoredSource

IMAGE, AUDIO, LABEL, MASK = "image", "audio", "label", "mask"
"""Columns of images, of recordings in a folder without images, of names of class folders, and of masks."""

_SOUNDS = frozenset(("wav",))
_MASKS = re.compile(r"(seg(mentation)?_?)?(masks?|labels?)|annotations|segmentations?|ground_?truth|gt", re.I)
_OF_MASK = re.compile(r"[_-](mask|seg|segmentation|label|gt)s?$", re.I)  # at the end of a mask's name
_Stem = tuple[tuple[str, ...], tuple[str, ...], str]  # folders above and below that of masks or images, and a name
_NUMBERS = re.compile(r"[-+.,\deE\s]*")
# while rows are read: folder that names are relative to, and name of the file; files cannot hold NUL
_BASE, _LABEL = "\0base", "\0label"


class FolderReading(Reading):
    """Reading of texts and cells of files."""

    encoding: str | None = Field(default=None, description="encoding of texts, such as windows-1251; null: detected")
    decimal: Literal[".", ","] | None = Field(default=None, description="sign before decimals; null: detected")


class Folder(StoredSource):
    """A folder of images with captions or labels, of images in class folders, or of texts, without conversion.

    Detected: ``metadata.csv`` or ``.jsonl`` (the *imagefolder* of Hugging Face), ``captions.csv``,
    ``.tsv``, ``.jsonl`` or ``.txt``, ``labels.csv``, annotations of COCO, Karpathy's JSON, the
    ``results.csv`` of Flickr30k; class folders, or ``images`` and ``masks`` with equal names, with or
    without folders of splits above; ``1.txt`` with one caption of ``1.jpg`` per line; without images ``.csv``,
    ``.tsv``, ``.jsonl`` and ``.txt`` (one text per line). Rows of one image become one item, with lists of the values
    that differ.

    Without images WAV files are read likewise. Columns are those of the file, with ``image`` for the image or
    ``audio`` for the recording, ``file_name`` for its path, ``label`` for its class folder, ``mask`` for its mask,
    ``captions`` for those of COCO, Karpathy and ``1.txt``, ``text`` for lines. A column, or names of files or folders,
    define the splits; else ``fractions`` are drawn, the same on every machine.
    """

    path: str = Field(description="the folder, or one file of texts: absolute, or relative to the data folder")
    annotations: str | None = Field(default=None, description="file with captions, labels or texts; null: by its name")
    file_column: str | None = Field(default=None, description="column of file names; null: by its name or content")
    split_column: str | None = Field(default=None, description="column with the split; null: `split`, if any")
    splits: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(
        default_factory=dict, description="split -> values of the column, or names of folders, that belong to it"
    )
    fractions: dict[str, float | tuple[str, ...]] = Field(
        default={"validation": 0.1, "test": 0.1},
        description="share of each split, drawn from train if the folder defines no splits, or only others than these; "
        "together: as for all sources",
    )
    reading: FolderReading = Field(default=FolderReading(), description="reading of texts and cells")

    def rows(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """See ``TableSource``; shares are drawn if the folder does not define any of their splits."""
        content = self.content(name, data_dir)
        is_defined = content.has_splits and not self.shares.keys().isdisjoint(content.splits)
        return (self.table if is_defined or not self.shares else super().rows)(split, name=name, data_dir=data_dir)

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
        """All rows, read again only if a file of the folder has changed.

        Raises:
            DataError: the folder has no readable data, or its files do not fit together.
        """
        path = path_of(self.path, name, data_dir, may_be_file=True)
        folder = path.parent if path.is_file() else path
        return _read(self.model_dump_json(), path, folder, _files_in(folder))

    def account(self, *, name: str, data_dir: Path | None, used: Collection[str] = ()) -> tuple[Count, ...]:
        """See ``Source``; also counts of files, and of rows of annotations."""
        return (*self.content(name, data_dir).counts, *super().account(name=name, data_dir=data_dir, used=used))

    @property
    def split_columns(self) -> tuple[str, ...]:
        """See ``TableSource``."""
        return (*super().split_columns, FILE, self.split_column or SPLIT)

    def split_called(self, name: str) -> str | None:
        """Split that a name stands for; None without one."""
        if self.splits:
            return next((split for split, names in self.splits.items() if name in names), None)
        return split_called(name)


@dataclass(frozen=True)
class FolderTable:
    """Content of a folder, one row per item.

    Attributes:
        folder: Folder of all files.
        rows: Columns of the annotations, and ``image`` (or ``audio``), ``file_name``, ``label`` of files.
        splits: Split of each row.
        files: Column of images or recordings, ``image`` or ``audio``; None: rows do not name files.
        unused: Images of the folder without a row or captions.
        without_image: Names of missing images, whose rows are left out, and files of captions without an image.
        unread: Ending -> number of files that are neither images, recordings nor annotations.
        counts: Counts of files, and of rows of annotations.
        notes: Dialect of each file of annotations, and columns that are replaced.
        has_splits: True if the folder defines splits; else all rows are ``train``.
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
    has_splits: bool = False


class _Files(NamedTuple):
    """Files of a folder.

    Attributes:
        keys: Path below the folder and ``file_key`` of every visible file, in the order of paths.
        hidden: Paths of files that are hidden, or in hidden folders.
        systems: Paths of files that operating systems create, such as thumbnails.
    """

    keys: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]
    systems: tuple[str, ...]


# files of Synology, QNAP, Windows, macOS and Linux; hidden ones begin with a point
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
                stamps[name] = arrow.file_key(path)
            except UnicodeEncodeError as error:
                raise DataError(f"the name of {name!a} in '{folder}' is not UTF-8; rename it") from error
            except OSError as error:
                raise DataError(f"'{path}' cannot be read ({error.strerror}); mend the link or remove it") from error
    return _Files(tuple(sorted(stamps.items())), tuple(sorted(hidden)), tuple(sorted(systems)))


@lru_cache(maxsize=8)
def _read(settings: str, path: Path, folder: Path, files: _Files) -> FolderTable:
    return _Reader(Folder.model_validate_json(settings), path, folder, files).table()


class _Reader:
    """Reader of a folder's table.

    Attributes:
        settings: Settings of the source.
        path: The folder, or one file of it.
        folder: The folder.
        files: All its files.
        names: Paths of the visible files.
        images: Paths of images; recordings if the folder has no images.
        column: Column of these in the table.
        rows: Count of the rows of annotations, once they are read.
        notes: Notes on files of annotations, likewise.
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
        captions = {} if annotations else self._caption_files()
        rows, without_image = self._with_caption_files(captions) if captions else self._rows(annotations)
        table = self._arrow({name: values for name, values in rows.items() if name not in (_BASE, _LABEL)})
        splits = self._splits(rows)
        read = {file.relative_to(self.folder).as_posix() for file in annotations}
        read |= {name for name in self.names if captions and _ending(name) == "txt"}
        unread, unused = self._unread({*self.images, *read}), tuple[str, ...]()
        if FILE in rows:
            others = self._other_images(rows)
            if self.column in rows:
                self.notes.append(f"column '{self.column}' is replaced by the files that '{FILE}' names")
            for name, paths in ({self.column: rows[FILE]} | others).items():
                table = _with_images(table, name, paths)
            unused = tuple(sorted(set(self.images).difference(rows[FILE], *others.values())))
            read |= {*self.images}
        lonely = without_image if captions else ()
        counts = self._counts(read - {*unused, *lonely}, unused, lonely, unread)
        findings = unused, without_image, unread, counts, tuple(self.notes), bool(splits)
        splits = splits or ("train",) * _count(rows)
        return FolderTable(self.folder, table, splits, self.column if FILE in rows else None, *findings)

    def _counts(
        self, read: set[str], unused: Sequence[str], lonely: Sequence[str], unread: Mapping[str, int]
    ) -> tuple[Count, ...]:
        """Counts of files and rows; for a single file, of the file and the images that its rows may name."""
        is_folder = not self.path.is_file()
        total = len(self.names) if is_folder else 1 + (len(self.images) if {*self.images} & read or unused else 0)
        left_out = [
            LeftOut(f"{self.column} files that no row or caption names", len(unused), next(iter(unused), "")),
            LeftOut("caption files without an image", len(lonely), next(iter(lonely), "")),
            *(
                LeftOut(f"{ending} files, which are not read ({remedy_of(ending)})", number)
                for ending, number in unread.items()
            ),
        ]
        if is_folder:
            others = {"hidden files": self.files.hidden, "files of operating systems": self.files.systems}
            total += sum(map(len, others.values()))
            left_out += [LeftOut(reason, len(names), next(iter(names), "")) for reason, names in others.items()]
        return (Count.of("files", total, len(read), left_out), *self.rows)

    def _annotations(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        if self.settings.annotations is None:
            return annotation_files(self.folder, bool(self.images))
        file = self.folder / self.settings.annotations
        if not file.is_file():
            hint = nearest(file.name, [path.name for path in self.folder.iterdir() if path.is_file()][:20])
            raise DataError(f"no file '{self.settings.annotations}' in '{self.folder}'; {hint}")
        return [file]

    def _unread(self, read: set[str]) -> dict[str, int]:
        """Ending -> number of files of a folder that are not read; empty for a single file."""
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
                what = "invalid texts" if isinstance(error, UnicodeError) else "values of several types"
                raise DataError(f"'{self.path}', column '{name}' holds {what}: {reason}") from error
        return pa.table(columns)

    def _rows(self, files: Sequence[Path]) -> tuple[Rows, tuple[str, ...]]:
        """The rows, and the names of missing images, whose rows are left out."""
        if files:
            rows = _together([self._annotated(file) for file in files])
            self.rows = [Count("rows", _count(rows), _count(rows))]
            # a single file may hold texts in a folder with unrelated images
            if FILE not in rows and (not self.images or self.path.is_file()):
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
            raise DataError(f"no readable data in '{self.folder}'; it should hold {wanted}, or the like")
        return self._class_folders(), ()

    def _annotated(self, file: Path) -> Rows:
        reading = self.settings.reading
        options: dict[str, Any] = {"encoding": reading.encoding, "decimal": reading.decimal}
        rows, dialect = read_annotations(file, self.settings.file_column, self.folder, files=self.images, **options)
        self.notes.append(f"{file.name}: {dialect}")
        base = file.parent.relative_to(self.folder).as_posix()
        label = file.stem if base in (".", "annotations") else f"{base} {file.stem}"
        return rows | {_BASE: [base] * _count(rows), _LABEL: [label] * _count(rows)}

    # ---- images and their rows

    def _caption_files(self) -> dict[str, list[str]]:
        """Image -> lines of the text file with its name and another ending, if half of the images have one."""
        files = {_stem(name): self.folder / name for name in self.names if _ending(name) == "txt"}
        encoding, beside = self.settings.reading.encoding, {name: files.get(_stem(name)) for name in self.images}
        texts = {name: text_and_dialect(file, self.folder, encoding)[0] for name, file in beside.items() if file}
        lines = {name: [line.strip() for line in lines_of(text) if line.strip()] for name, text in texts.items()}
        captions = {name: own for name, own in lines.items() if own}
        # files of boxes, and single notes, lie next to images too
        are_numbers = all(_NUMBERS.fullmatch(line) for own in captions.values() for line in own)
        return {} if are_numbers or 2 * len(captions) < len(self.images) else captions

    def _with_caption_files(self, captions: Mapping[str, Sequence[str]]) -> tuple[Rows, tuple[str, ...]]:
        """Rows of images with files of captions, and such files without an image."""
        pairs = [(name, line) for name, lines in captions.items() for line in lines]
        rows: Rows = {FILE: [name for name, _ in pairs], CAPTIONS: [line for _, line in pairs]}
        with contextlib.suppress(DataError):  # without class folders
            folders = self._class_folders()
            for column in folders.keys() - {FILE}:  # classes, or masks
                value_of = dict(zip(folders[FILE], folders[column], strict=True))
                rows[column] = [value_of[name] for name in rows[FILE]]
        known = set(map(_stem, self.images))
        return _joined(rows), tuple(name for name in self.names if _ending(name) == "txt" and _stem(name) not in known)

    def _matched(self, rows: Rows, file: Path) -> tuple[Rows, tuple[str, ...]]:
        """Rows with the paths of images in place of their names in the file, and the names of missing images."""
        if FILE not in rows:
            columns = ", ".join(name for name in rows if name not in (_BASE, _LABEL))
            remedy = "such as file_name; name it in file_column (--file-column)"
            raise DataError(f"'{file}' has no column of file names, {remedy}: {columns}")
        find = _finder(self.images)
        paths = [find(str(name), base) for name, base in zip(rows[FILE], rows[_BASE], strict=True)]
        missing = [str(name) for name, path in zip(rows[FILE], paths, strict=True) if path is None]
        named = self._missing_images(missing, len(paths), file) if missing else ()
        kept = [number for number, path in enumerate(paths) if path is not None]
        reason = LeftOut("whose image is missing or not read", len(missing), next(iter(named), ""))
        self.rows = [Count.of("rows", len(paths), len(kept), [reason])]
        return {name: [values[number] for number in kept] for name, values in (rows | {FILE: paths}).items()}, named

    def _missing_images(self, missing: Sequence[str], rows: int, file: Path) -> tuple[str, ...]:
        """Names in rows of images that are missing, or of a type that is not read."""
        there = {PurePosixPath(name).name for name in self.names}
        hints = dict.fromkeys(missing, "")
        for name in (name for name in hints if PurePosixPath(name.replace("\\", "/")).name in there):
            hints[name] = f" (there, but {PurePosixPath(name).suffix} is not read: {remedy_of(name)})"
        first, hint = max(hints.items(), key=lambda entry: bool(entry[1]))
        if len(missing) == rows:
            raise DataError(f"'{file}': neither '{first}' nor any other image of its rows is in the folder{hint}")
        if self.settings.incomplete == "refuse":
            count = f"names {len(hints)} images that are not in '{self.folder}', first '{first}'{hint}"
            remedy = "add them, or leave these rows out (incomplete: leave_out), as polyfed prepare does"
            raise DataError(f"'{file}' {count}; {remedy}")
        return tuple(name + hint for name, hint in hints.items())

    def _class_folders(self) -> Rows:
        """Images with the innermost folder above them, except that of the split, as label; or with their masks."""
        if masks := self._masks():
            return {FILE: list(masks), MASK: list(masks.values())}
        level = self._split_level(self.images, needs_class=True)
        labels = []
        for path in self.images:
            folders = _folders(path)
            if not (classes := [name for depth, name in enumerate(folders) if depth != level]):
                named = f" ('{folders[level]}' is taken for a split)" if level is not None and folders else ""
                remedy = "add a captions.csv (file_name, caption), a 1.txt for each 1.jpg, or folders of their classes"
                raise DataError(f"'{self.folder}' has images alone, such as '{path}'{named}; {remedy}")
            labels.append(classes[-1])
        return {FILE: list(self.images), LABEL: labels}

    def _masks(self) -> dict[str, str]:
        """Image -> its mask, if a folder of masks has the same names as a folder of images.

        Raises:
            DataError: at least half of the masks have names of images, but not all, or an image lacks its mask.
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
            what = f"'{self.folder}': masks have names of images, such as '{masks[shared[0]]}', but not '{odd[0]}'"
            remedy = "add what it lacks, name masks in a metadata.csv (columns file_name, mask), or rename the class"
            raise DataError(f"{what}; {remedy}")
        return paired

    def _other_images(self, rows: Rows) -> dict[str, list[str | None]]:
        """Column of paths of further images of the folder, such as masks -> these paths.

        Raises:
            DataError: some of its images are missing.
        """
        columns: dict[str, list[str | None]] = {}
        there, bases = set(self.images), rows.get(_BASE) or [""] * _count(rows)
        for name in rows.keys() - {IMAGE, FILE, _BASE, _LABEL}:
            known = [value for value in rows[name] if value is not None]
            if not known or not all(isinstance(value, str) and _ending(value) in image_endings() for value in known):
                continue
            paths = [value and _below(base, value) for value, base in zip(rows[name], bases, strict=True)]
            if (there.isdisjoint(paths) and not is_mask(name)) or paths == rows[FILE]:
                continue
            if missing := set(paths) - there - {None}:
                what = f"'{self.path}', column '{name}': no image '{min(missing)}'"
                raise DataError(f"{what}; write paths from the folder on")
            columns[name] = paths
        return dict(sorted(columns.items()))

    # ---- splits

    def _splits(self, rows: Rows) -> tuple[str, ...]:
        """Split of each row, by a column, or by files or folders with at least two splits; else empty."""
        if (column := self.settings.split_column or SPLIT) in rows:
            return tuple(self._split_of(value, column) for value in rows[column])
        if self.settings.split_column is not None:
            names = [name for name in rows if name not in (_BASE, _LABEL)]
            raise DataError(f"'{self.folder}': no column '{column}' (split_column); {nearest(column, names)}")
        for splits in self._named_splits(rows):
            if None not in splits and len(set(splits)) > 1:
                return tuple(map(str, splits))
        return ()

    def _split_of(self, value: object, column: str) -> str:
        if (split := self.settings.split_called(str(value))) is None:
            named = "; ".join(f"{ours}: {', '.join(names)}" for ours, names in self.settings.splits.items())
            valid = named or "train, validation, test"
            what = f"'{value}' is not one of the splits ({valid}); add it to one under `splits`"
            raise DataError(f"'{self.folder}', column '{column}': {what}")
        return split

    def _named_splits(self, rows: Rows) -> Iterable[list[str | None]]:
        """Splits of rows by names of their files of annotations, and by folders of their images."""
        if _LABEL in rows:
            yield [self.settings.split_called(name) for name in rows[_LABEL]]
        if FILE in rows:
            level = self._split_level(rows[FILE], needs_class=_LABEL not in rows)
            yield [None if level is None else self.settings.split_called(_folders(path)[level]) for path in rows[FILE]]

    def _split_level(self, images: Sequence[str], needs_class: bool) -> int | None:
        """Outermost level of folders that all name splits, at least two different ones; None without such a level.

        Names with further words, such as ``valid`` and ``test_strip``, are classes if the folder has no other classes.
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
    """True if a folder or a column has a usual name of masks."""
    return _MASKS.fullmatch(name) is not None


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _ending(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _count(rows: Rows) -> int:
    return len(next(iter(rows.values())))


def _together(parts: Sequence[Rows]) -> Rows:
    """Rows of several files; a column of texts in one file becomes texts in all, with numbers as written."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: joined([part.get(name) or [None] * _count(part) for part in parts]) for name in names}


def _finder(images: Sequence[str]) -> Callable[[str, str], str | None]:
    """Finds an image by its path, by its name in any folder, or by its name without ending.

    As systems write names differently, names are compared with composed accents and endings in lower case; exact paths
    come first.
    """
    paths = set(images)
    by_name: dict[str, list[str]] = {}
    for path in images:
        pure = _folded(path)
        for name in {str(pure), pure.name, pure.stem}:
            by_name.setdefault(name, []).append(path)

    def find(name: str, base: str) -> str | None:
        if (wanted := _below(base, name)) in paths:
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
    """One row per image; values that differ among its rows become lists, without missing ones."""
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
    parts = [pa.nulls(len(paths), pa.binary()), paths]
    image = pa.StructArray.from_arrays(parts, fields=list(arrow.IMAGE), mask=paths.is_null())
    if column in table.column_names:
        table = table.drop_columns([column])
    return table.append_column(column, image)


def _below(base: str, name: str) -> str:
    return PurePosixPath(base, name.strip().replace("\\", "/")).as_posix()
