"""Folders as Parquet: every image checked, every split in shards, and a report of problems in the data."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from pyarrow.types import is_struct

from polyfed.core.activity import prepared
from polyfed.core.errors import ConfigError, DataError
from polyfed.core.files import write_atomically
from polyfed.data.arrow import innermost, is_file, is_list, is_text, lacking
from polyfed.data.dialects import is_numeric_text
from polyfed.data.files import FILE, SPLIT_NAMES, TEXT_NAMES, holds_texts
from polyfed.data.images import decode, image_bytes, mask_levels, opened_image, reason_of, scaling_of
from polyfed.data.sounds import waveform
from polyfed.data.sources.folder import AUDIO, IMAGE, Folder, is_mask
from polyfed.data.sources.stored import Parquet
from polyfed.data.tables import SplitTable

LABELS = ("label", "labels", "class", "category", "topic", "target", "sentiment", "rating", "fine_label")
_FEW = 1000  # most distinct texts that may be class names
_SOUNDS = (AUDIO, "sound", "recording", "wav")
NO_CONTENT = ("file_name", "split", "id", "path", "url")


@dataclass(frozen=True)
class ColumnRoles:
    """Columns that seem to hold images, texts, classes, recordings and masks; None without any.

    Attributes:
        image, text, label, audio, mask: names of columns.
        table: Columns that are one value together.
    """

    image: str | None = None
    text: str | None = None
    label: str | None = None
    audio: str | None = None
    mask: str | None = None
    table: tuple[str, ...] | None = None

    @classmethod
    def of(cls, table: pa.Table, label: str | None = None) -> ColumnRoles:
        """Roles by usual names; else by the form of values: texts are long and differ, classes repeat.

        ``label`` is the column of classes, if known.
        """
        files = [field.name for field in table.schema if is_file(field.type)]
        structs = {field.name: {part.name for part in field.type} for field in table.schema if is_struct(field.type)}
        decoded = (name for name, parts in structs.items() if {"array", "sampling_rate"} <= parts)
        audio = _called(files, _SOUNDS) or _first(decoded)
        images = [name for name in files if name != audio]
        image = _first(name for name in images if not is_mask(name)) or _first(images)
        mask = _first(name for name in images if name != image)
        free = [name for name in table.column_names if name not in files and name.lower() not in NO_CONTENT]
        texts = [name for name in free if is_text(innermost(table.schema.field(name).type))]
        texts = [name for name in texts if not is_numeric_text(_distinct_texts(table.column(name)))]

        def is_of_classes(name: str) -> bool:
            values = table.column(name)
            if holds_texts(name) or is_list(values.type) or not len(values):  # texts, however few distinct
                return False
            different = len(values.unique())
            return different <= _FEW and 2 * different <= len(values)

        label = label or _called(free, LABELS) or _first(filter(is_of_classes, texts))
        others = [name for name in texts if name != label]
        return cls(image, _called(others, TEXT_NAMES) or _first(others), label, audio, mask)

    def absent(self, splits: Mapping[str, SplitTable]) -> list[str]:
        """Notes on splits that lack classes of another split."""
        columns = {split: table.read(self.label) for split, table in splits.items() if self.label}
        held = {split: set(one.unique().to_pylist()) for split, one in columns.items() if not is_list(one.type)}
        every = set().union(*held.values()) - {None}
        gaps = {split: sorted(every - own, key=str) for split, own in held.items()}
        lines = {split: f"{split} lacks {len(gap)} of {len(every)} classes" for split, gap in gaps.items() if gap}
        return [f"{line}, such as '{gaps[split][0]}'" for split, line in lines.items()]

    def sample(self, table: SplitTable, unused: Mapping[str, str] = MappingProxyType({})) -> list[str]:
        """The first item, one line per column, with its role or the reason why it has none.

        Raises:
            DataError: its image, mask or recording cannot be read.
        """
        words = {"image": "image", "text": "text", "label": "class", "audio": "recording", "mask": "mask"}
        role_of = dict.fromkeys(self.table or (), ("table", "table"))
        role_of |= {getattr(self, role): (role, word) for role, word in words.items()}
        lines = []
        for name in table.schema.names:
            value = table.read(name)[0].as_py()
            shown = " ".join(str(value[0] if isinstance(value, list) and value else value).split())[:60]
            role, word = role_of.get(name, ("", ": ".join(filter(None, ["not used", unused.get(name)]))))
            if role in ("image", "audio", "mask"):
                try:
                    shown = _look(role, value, table.folder)
                except ConfigError:  # a missing package
                    raise
                except Exception as error:  # decoders raise errors of any type
                    raise DataError(f"{table.place}: column '{name}' holds no {word}s ({reason_of(error)})") from error
            lines.append(f"{name} ({word}): {shown}")
        return lines

    @property
    def settings(self) -> str:
        columns = {name: _as_yaml(getattr(self, name)) for name in ("image", "text", "audio") if getattr(self, name)}
        columns |= {"table": f"[{', '.join(map(_as_yaml, self.table))}]"} if self.table else {}
        named = ", ".join(f"{modality}: {column}" for modality, column in columns.items())
        return f"columns: {{{named}}}" + (f", targets: {{label: {_as_yaml(self.label)}}}" if self.label else "")


def _distinct_texts(values: pa.ChunkedArray) -> list[str]:
    """Distinct texts of a column; none of a column of lists."""
    return [] if is_list(values.type) else values.unique().drop_null().to_pylist()


def _as_yaml(name: str) -> str:
    """Name of a column as YAML reads it back, in quotes unless it is a plain word."""
    is_word = re.fullmatch(r"[A-Za-z]\w*", name) and yaml.safe_load(name) == name
    return name if is_word else json.dumps(name, ensure_ascii=False)


def _look(role: str, value: Any, folder: Path | None) -> str:
    """Short description of a file."""
    if role == "audio":
        return f"{len(waveform(value, 1000, folder)) / 1000:.2f} s"
    data = image_bytes(value, folder)
    with opened_image(data) as image:
        shown = f"{image.width} x {image.height} {image.format}"
    levels = [*map(str, np.flatnonzero(mask_levels(data, "nearest")))] if role == "mask" else []
    return shown + (f", values {', '.join([*levels[:9], *(['...'] if levels[9:] else [])])}" if levels else "")


def _first(names: Iterable[str]) -> str | None:
    return next(iter(names), None)


def _called(names: Sequence[str], usual: Sequence[str]) -> str | None:
    lower = {name.lower(): name for name in reversed(names)}
    return next((lower[name] for name in usual if name in lower), None)


REPORT = "report.json"
"""File of a prepared folder with its findings."""

BATCH_ITEMS = 64  # rows in memory at a time
SHARD_BATCHES = 500_000_000  # bytes of rows, after which a new file begins
_STRUCT = {"bytes", "path"}
_ORDER = tuple(reversed(SPLIT_NAMES))  # test, validation, train: duplicates stay in the split that evaluates


@dataclass
class FolderFindings:
    """Items written, and problems in the data.

    Attributes:
        items: split -> items written.
        broken: image -> reason why it cannot be read; its item is left out.
        in_two_splits: pairs of items of two splits with bit-identical images, or without images identical content; the
            first split evaluates models.
        repeated: number of items with the image or content of an earlier item of their split.
        lacking: column -> items without a value in it.
        unused: images of the folder that no row names.
        without_image: names in rows of images that do not exist; these rows are left out.
        unread: ending -> files of the folder that are not read.
        absent: notes on splits that lack classes of another split.
        sample: the first training item, one line per column with its role.
        scaled: scale of images that do not have 8 bits -> number of images.
        roles: guessed roles of columns.
    """

    items: dict[str, int] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    in_two_splits: list[tuple[str, str]] = field(default_factory=list)
    repeated: int = 0
    lacking: dict[str, int] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    without_image: tuple[str, ...] = ()
    unread: Mapping[str, int] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    sample: list[str] = field(default_factory=list)
    scaled: dict[str, int] = field(default_factory=dict)
    roles: ColumnRoles = field(default_factory=lambda: ColumnRoles(None, None, None))


def prepare_folder(folder: Folder, destination: Path, *, drop_duplicates: bool = False) -> FolderFindings:
    """Write a folder as Parquet in the Hugging Face layout, with the unchanged bytes of every image.

    Args:
        folder: settings of the source, with an absolute path.
        destination: folder to be made; it appears when it is complete.
        drop_duplicates: leave out of train (and validation) the items that test (or validation) has too.

    Raises:
        DataError: the folder cannot be read, no item of a split remains, or the destination exists.
    """
    if destination.exists():
        raise DataError(f"'{destination}' exists; name a new folder, or remove it")
    content = folder.content()
    if content.files == AUDIO:
        raise DataError(f"'{folder.path}' holds recordings, which need no preparation: polyfed init --sounds")
    findings = FolderFindings(unused=content.unused, without_image=content.without_image, unread=content.unread)
    findings.roles = ColumnRoles.of(content.rows)
    sieve = _Sieve(drop_duplicates, findings, content.folder)
    with _appearing(destination) as temporary:
        drawn = () if content.has_splits else [split for split, share in folder.shares.items() if share]
        for split in (one for one in _ORDER if one in (*content.splits, *drawn)):
            table = folder.rows(split, name="prepare", data_dir=None)
            rows = pa.table({column: table.read(column) for column in table.schema.names})
            findings.items[split] = _write(rows, split, temporary, sieve)
            if not findings.items[split]:
                raise DataError(f"'{folder.path}', split '{split}': none of {len(rows)} items is left; {sieve.reasons}")
        written = Parquet(path=str(temporary.absolute()))
        tables = {split: written.table(split, name="prepare", data_dir=None) for split in findings.items}
        findings.absent = findings.roles.absent(tables)
        findings.sample = findings.roles.sample(next(reversed(tables.values())))
        write_atomically(temporary / REPORT, json.dumps(asdict(findings), indent=1, ensure_ascii=False).encode())
    return findings


@contextmanager
def _appearing(destination: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to the destination at the end, or removed on an error."""
    temporary = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(destination)
    except OSError as error:
        raise DataError(f"cannot write '{destination}' ({error.strerror or error}); choose another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _Sieve:
    """Filter of broken and duplicate rows, with memory of all splits."""

    def __init__(self, drop: bool, findings: FolderFindings, folder: Path) -> None:
        self.drop, self.findings, self.folder = drop, findings, folder
        self.seen: dict[bytes, tuple[str, str]] = {}  # digest -> split and name of its first item

    @property
    def reasons(self) -> str:
        broken = next(iter(self.findings.broken.items()), None)
        first = f"{len(self.findings.broken)} broken, first '{broken[0]}' ({broken[1]})" if broken else "none is broken"
        return f"{first}; {len(self.findings.in_two_splits)} are in another split"

    def kept(self, rows: Sequence[dict[str, Any]], split: str) -> list[dict[str, Any]]:
        return [row for row in rows if self._keeps(row, split)]

    def _keeps(self, row: dict[str, Any], split: str) -> bool:
        data = b"" if IMAGE in row else json.dumps(row, default=str, sort_keys=True).encode()
        # the image itself last: its bytes identify duplicates
        columns = [name for name, value in row.items() if isinstance(value, dict) and value.keys() == _STRUCT]
        for column in sorted(columns, key=IMAGE.__eq__):
            if (image := self._image(row, column)) is None:
                return False
            data = image
        name = str(row.get(FILE) or data[:60].decode())
        if (digest := hashlib.sha256(data).digest()) not in self.seen:
            self.seen[digest] = split, name
            return True
        earlier, first = self.seen[digest]
        if earlier == split:
            self.findings.repeated += 1
            return True
        self.findings.in_two_splits.append((f"{earlier}: {first}", f"{split}: {name}"))
        return not self.drop

    def _image(self, row: dict[str, Any], column: str) -> bytes | None:
        """Bytes of an image, which are put into the row; None if it is broken."""
        path = row[column]["path"]
        try:
            data = image_bytes(row[column], self.folder)
            decode(data, 32, "squash", "bilinear")  # reads all of the file, as in training
            with opened_image(data) as image:
                scaling = scaling_of(image)
        except Exception as error:  # Pillow's decoders raise errors of any type
            self.findings.broken[path] = reason_of(error)
            return None
        if scaling is not None and column == IMAGE:
            self.findings.scaled[scaling.words] = self.findings.scaled.get(scaling.words, 0) + 1
        row[column] = {"bytes": data, "path": path}
        return data


def _write(rows: pa.Table, split: str, folder: Path, sieve: _Sieve) -> int:
    """Write the rows of a split in shards; returns the number of rows kept."""
    schema = _schema(rows.schema)
    written, shards, size = 0, [folder / f"{split}.0"], 0
    writer = pq.ParquetWriter(shards[0], schema)
    try:
        for start in prepared(f"{split}: items", range(0, len(rows), BATCH_ITEMS), len(rows), size=BATCH_ITEMS):
            batch = pa.Table.from_pylist(sieve.kept(rows.slice(start, BATCH_ITEMS).to_pylist(), split), schema)
            for name in batch.column_names:
                if not is_file(batch.schema.field(name).type) and (gaps := int(lacking(batch.column(name)).sum())):
                    sieve.findings.lacking[name] = sieve.findings.lacking.get(name, 0) + gaps
            written, size = written + len(batch), size + batch.nbytes
            writer.write_table(batch)
            if size > SHARD_BATCHES and start + BATCH_ITEMS < len(rows):
                writer.close()
                shards.append(folder / f"{split}.{len(shards)}")
                writer, size = pq.ParquetWriter(shards[-1], schema), 0
    finally:
        writer.close()
    for number, shard in enumerate(shards):
        shard.rename(folder / f"{split}-{number:05d}-of-{len(shards):05d}.parquet")
    return written


def _schema(schema: pa.Schema) -> pa.Schema:
    """Schema with Hugging Face metadata, by which image columns open as images everywhere."""
    features = {entry.name: {"_type": "Image"} for entry in schema if is_file(entry.type)}
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
