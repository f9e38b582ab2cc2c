"""Stored data sets: files of Parquet, Arrow and Feather, what the library ``datasets`` saved, and those of the hub."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from polyfed.core.errors import DataError, nearest
from polyfed.core.extras import brought_by
from polyfed.data import arrow
from polyfed.data.files import usual_name
from polyfed.data.source import OTHER_LAYOUTS, path_of
from polyfed.data.tables import SplitTable, StoredSource

_SPARE = 1 << 28  # bytes; values are held packed, unpacked and as what is made of them
_READ = """
import resource, sys
import pyarrow.parquet as pq
most, column, *files = sys.argv[1:]
own = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (own + int(most),) * 2)
try:
    for file in files:
        for _ in pq.ParquetFile(file).iter_batches(1024, columns=[column], use_threads=False):
            pass
except MemoryError:
    sys.exit(1)
except Exception:
    pass  # the calling process meets it too, and reports the file
"""
_FILE = re.compile(r"(?P<split>\w+)(-(?P<shard>\d+)-of-(?P<shards>\d+)(-\w+)?)?\.parquet")
_T = TypeVar("_T")


class Parquet(StoredSource):
    """A folder with ``<split>.parquet`` or ``<split>-00000-of-00002.parquet``, ... per split; a file is 'train'.

    Columns are read at first use. Class names come from the files' Hugging Face metadata. Files may hold a column as
    integers of different width, as texts or lists of different offsets, or as nulls alone.
    """

    short_name: ClassVar[str] = "parquet"

    path: str = Field(description="folder with the files, or one file: absolute, or relative to the data folder")
    max_bytes: arrow.MaxBytes = None
    id: str | None = Field(default=None, description="column that identifies an item; None: by path, split and row")

    splits: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="split -> stored splits that are concatenated for it: of Karpathy's COCO {train: [train, restval], "
        "validation: [val]}",
    )

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The files of one split as a table; reads their schemas."""
        path = path_of(self.path, name, data_dir, may_be_file=self.path.endswith(".parquet"))
        folder, where = (path.parent if path.is_file() else path), Path(self.path).as_posix()
        what = f"source '{name}', path '{self.path}'"
        stored = {path: "train"} if path.is_file() else _splits(folder, what)
        parts = self.splits.get(split) or (usual_name(split, stored.values()),)
        files = [file for part in parts for file in _files(stored, part, what)]
        shards, stamp = ParquetShards(files, where, self.max_bytes), arrow.fingerprint_of(*map(arrow.file_key, files))

        def everywhere(column: str) -> pa.ChunkedArray:
            # classes and values of all splits, whichever is opened
            return ParquetShards([*stored], where, self.max_bytes).having(column).read(column)

        return SplitTable(
            read=shards.read,
            count=shards.count,
            schema=shards.common_schema(),
            where=where,
            split=split,
            key=lambda column: stamp + shards.named_files_key(column, folder),
            ids=self.id,
            everywhere=everywhere,
            filled=shards.filled,
            folder=folder,
        )


def _splits(folder: Path, what: str) -> dict[Path, str]:
    """File -> its split, in the order of names."""
    matches = {file: _FILE.fullmatch(file.name) for file in sorted(folder.iterdir())}
    if not (stored := {file: match["split"] for file, match in matches.items() if match}):
        example = "train.parquet or train-00000-of-00002.parquet"
        raise DataError(f"{what}: no file such as {example}; {OTHER_LAYOUTS}")
    return stored


def _files(stored: Mapping[Path, str], split: str, what: str) -> list[Path]:
    """Files of a split in shard order: shards 0 to n - 1 of n, each once, or a single file."""
    if not (files := [file for file, own in stored.items() if own == split]):
        hint = f"{nearest(split, {*stored.values()})}; or give it a share in `fractions`"
        raise DataError(f"{what}: no split '{split}'; {hint}")
    shards = [match for file in files if (match := _FILE.fullmatch(file.name))]
    expected = int(shards[0]["shards"] or 1) if shards else 0
    if [int(match["shard"] or 0) for match in shards] != list(range(expected)):
        names = ", ".join(match.string for match in shards)
        needed = f"needs exactly {expected} file(s) but has {names}"
        raise DataError(f"{what}, split '{split}': {needed}; fetch or remove files")
    return files


class ParquetShards:
    """Parquet files as one data set, with column types that hold the values of all files unchanged."""

    def __init__(self, files: Sequence[Path], where: str, max_bytes: int | None) -> None:
        self.files, self.where, self.max_bytes = files, where, max_bytes
        self.schemas = [self._of_file(file, pq.read_schema) for file in files]
        for file, schema in zip(files, self.schemas, strict=True):
            if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
                raise DataError(f"{where}/{file.name}: two columns are called '{twice[0]}'; rename one of them")

    def having(self, column: str) -> ParquetShards:
        files = zip(self.files, self.schemas, strict=True)
        return ParquetShards([file for file, schema in files if column in schema.names], self.where, self.max_bytes)

    def count(self) -> int:
        # a table without columns cannot count its rows
        return sum(self._of_file(file, pq.read_metadata).num_rows for file in self.files)

    def common_schema(self) -> pa.Schema:
        """The first file's columns with types common to all files; without one, reading the column fails."""
        schema = self.schemas[0]
        for place, field in enumerate(schema):
            common = field.type
            for dtype in [other.field(field.name).type for other in self.schemas if field.name in other.names]:
                common = _common(common, dtype) or common
            schema = schema.set(place, field.with_type(arrow.plain_type(common)))
        return schema

    def read(self, column: str) -> pa.ChunkedArray:
        if self.max_bytes is not None and sys.platform == "linux":  # elsewhere an address space has no limit
            _try_elsewhere(self.max_bytes, column, *map(str, self.files))
        dtype, most = self._type(column), arrow.most_bytes(self.files, self.max_bytes)
        values = list[pa.ChunkedArray]()
        for file in self.files:
            left, where = most - sum(part.nbytes for part in values), f"{self.where}/{file.name}, column '{column}'"
            values.append(self._of_file(file, partial(_column, column=column, most=left, where=where)))
        try:
            return pa.chunked_array([chunk for part in values for chunk in part.cast(dtype).chunks], dtype)
        except pa.ArrowException as error:
            names = ", ".join(file.name for file in self.files)
            reason = f"the values do not fit one type ({_first_line(error)}); write all files with one type"
            raise DataError(f"{self.where}, {names}, column {column}: {reason}") from error

    def filled(self, column: str) -> bool:
        """True if statistics of the files show that no part of a column is null, without reading images."""
        parts = [_chunks(self._of_file(file, pq.read_metadata), column) for file in self.files]
        null_free = (part.is_stats_set and part.statistics.null_count == 0 for chunks in parts for part in chunks)
        return all(parts) and all(null_free)

    def named_files_key(self, column: str, folder: Path) -> str:
        """See ``arrow.named_files_key``; values are read only if statistics show images without bytes."""
        parts = [_chunks(self._of_file(file, pq.read_metadata), f"{column}.bytes") for file in self.files]
        lack_bytes = any(part.is_stats_set and part.statistics.null_count for chunks in parts for part in chunks)
        return arrow.named_files_key(self.read(column), folder) if lack_bytes else ""

    def _type(self, column: str) -> pa.DataType:
        common, holder = self.schemas[0].field(column).type, self.files[0]
        for file, schema in zip(self.files[1:], self.schemas[1:], strict=True):
            if column not in schema.names:
                raise DataError(f"{self.where}/{file.name}: no column '{column}', which {holder.name} has; add it")
            dtype = schema.field(column).type
            if (both := _common(common, dtype)) is None:
                types = f"holds {dtype}, but {holder.name} holds {common}; write both files with one type"
                raise DataError(f"{self.where}/{file.name}, column '{column}': {types}")
            common, holder = both, holder if both == common else file
        return arrow.plain_type(common)

    def _of_file(self, file: Path, read: Callable[[Path], _T]) -> _T:
        try:
            return read(file)
        except (OSError, LookupError, pa.ArrowException) as error:
            reason = f"cannot be read as Parquet ({_first_line(error)}); fetch the file again"
            raise DataError(f"{self.where}/{file.name}: {reason}") from error


@cache
def _try_elsewhere(most: int, *column_and_files: str) -> None:
    """Read a column in another process with limited memory, as a page may be larger than its header states.

    Raises:
        DataError: reading takes more memory, or ends the process.
    """
    command = [sys.executable, "-c", _READ, str(4 * most + _SPARE), *column_and_files]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        names = ", ".join(column_and_files[1:])
        raise DataError(f"{names}: reading takes more memory than {most:,} bytes allow (max_bytes of the source)")


def _column(file: Path, column: str, most: int, where: str) -> pa.ChunkedArray:
    """A column, decoded in parts: a few kilobytes may stand for a gigabyte of equal values."""
    with pq.ParquetFile(file) as opened:
        chunks = _chunks(opened.metadata, column)
        needed = sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks)
        arrow.require_bytes(needed, most, where)
        largest = max((chunk.total_uncompressed_size for chunk in chunks), default=0)
        # a value may be as large as its chunk; a chunk that hardly shrinks holds many values
        least = 1 if any(chunk.total_uncompressed_size > 100 * chunk.total_compressed_size for chunk in chunks) else 256
        parts = opened.iter_batches(min(max(least, most // 8 // max(1, largest)), 1 << 16), columns=[column])
        dtype = arrow.plain_type(opened.schema_arrow.field(column).type)
        # cast before counting: categories are small, their values may be large
        plain = (pa.record_batch([part.column(column).cast(dtype)], [column]) for part in parts)
        return pa.chunked_array([part.column(0) for part in arrow.bounded(plain, most, where)], dtype)


def _chunks(metadata: pq.FileMetaData, column: str) -> list[pq.ColumnChunkMetaData]:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    parts = [group.column(number) for group in groups for number in range(group.num_columns)]
    # a struct's parts are called column.part, and a name may itself have dots
    return [part for part in parts if f"{part.path_in_schema}.".startswith(f"{column}.")]


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """A type that holds the values of both unchanged, or None: integers do not become floats or decimals."""
    if one == other:
        return one
    try:
        schemas = [pa.schema([("", dtype)]) for dtype in (one, other)]
        both = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None
    inner = [arrow.innermost(dtype) for dtype in (one, other) if not pa.types.is_null(arrow.innermost(dtype))]
    tests = (pa.types.is_integer, arrow.is_text)
    return both if all(test(dtype) == test(arrow.innermost(both)) for dtype in inner for test in tests) else None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


# ---- files of Arrow, and what `datasets` opens

_ENDINGS = (".arrow", ".feather", ".ipc")
_SAVED = ("dataset_dict.json", "state.json")


class Arrow(StoredSource):
    """A data set written by ``save_to_disk`` of ``datasets``, or files ``train.arrow`` (.feather, .ipc) in a folder.

    A data set without splits, or a single file, is ``train``. Images are image features with their bytes, or with
    paths within the folder.
    """

    short_name: ClassVar[str] = "arrow"

    path: str = Field(description="folder, or one file: absolute, or relative to the data folder")
    splits: dict[str, str] = Field(default_factory=dict, description="split -> saved split, or file without its ending")
    max_bytes: arrow.MaxBytes = None
    id: str | None = Field(default=None, description="column that identifies an item; None: by path, split and row")

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The rows of one split; opens the files, which stay mapped into memory."""
        path = path_of(self.path, name, data_dir, may_be_file=True)
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in _ENDINGS)
        parts = _opened_parts(path, files, name, arrow.most_bytes(files, self.max_bytes))
        if (wanted := self.splits.get(split) or usual_name(split, parts)) not in parts:
            raise DataError(
                f"source '{name}', path '{self.path}': no split '{wanted}'; {nearest(wanted, parts)}; or set fractions"
            )
        return SplitTable.of_parts(
            parts[wanted],
            parts.values,
            where=Path(self.path).as_posix(),
            split=split,
            stamp=arrow.fingerprint_of(wanted, *map(arrow.file_key, files)),
            ids=self.id,
            folder=path if path.is_dir() else path.parent,
        )


def _opened_parts(path: Path, files: Sequence[Path], name: str, most: int) -> dict[str, Any]:
    """Split -> data set that ``save_to_disk`` wrote, or file in the folder, with valid offsets and indices."""
    is_saved = any((path / mark).is_file() for mark in _SAVED)
    try:
        # a saved set lists its files itself
        unpacked = map(arrow.unpacked_bytes, filter(Path.is_file, path.rglob("*")) if is_saved else files)
        arrow.require_bytes(sum(unpacked), most, f"'{path}'")
        if path.is_file():
            parts = {"train": _opened(path, most)}
        elif is_saved:
            parts = _saved(path)
        else:
            parts = {file.stem: _opened(file, most) for file in files if file.parent == path}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        remedy = "give a folder that save_to_disk of datasets wrote, or files of Arrow IPC or Feather"
        raise DataError(f"source '{name}': cannot read '{path}' ({reason}); {remedy}") from error
    if not parts:
        wanted = f"a data set that save_to_disk wrote nor files ending in {', '.join(_ENDINGS)}"
        remedy = "give another path, or another source (folder, parquet)"
        raise DataError(f"source '{name}': '{path}' holds neither {wanted}; {remedy}")
    return parts


def _saved(folder: Path) -> dict[str, Any]:
    with brought_by("hub"):
        import datasets

    saved = datasets.load_from_disk(str(folder))
    parts = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    for part in parts.values():
        part.data.validate(full=True)
        if part._indices is not None and pc.max(part._indices.column(0)).as_py() >= len(part.data):
            raise IndexError(f"an index is beyond the {len(part.data)} rows")
    return parts


def _opened(file: Path, most: int) -> pa.Table:
    """Table of one file, of either format."""
    reader = pa.ipc.open_stream(arrow.ipc_stream(file))
    return pa.Table.from_batches(arrow.bounded(reader, most, f"'{file}'"), reader.schema)


class Hub(StoredSource):
    """A data set of the Hugging Face hub, downloaded once, then read column by column from its cache."""

    short_name: ClassVar[str] = "hub"
    pip_extra: ClassVar[str] = "hub"

    repository: str = Field(description="name on the hub, e.g. uoft-cs/cifar100")
    config: str | None = Field(default=None, description="configuration of the data set, where it has several")
    revision: str | None = Field(default=None, description="commit or tag; fix it, or the data may change")
    splits: dict[str, str] = Field(default_factory=dict, description="split -> its name on the hub, or 'train[90%:]'")
    id: str | None = Field(
        default=None, description="column that identifies an item; None: repository, split and row do"
    )

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The table of one split, downloaded unless it is in the cache of ``datasets``."""
        with brought_by("hub"):
            import datasets  # takes a second, and most runs do not need it

        data = self._loaded(self.splits.get(split, split), name)
        return SplitTable.of_parts(
            data,
            lambda: self._loaded(None, name).values(),
            where=self.repository,
            split=split,
            stamp=arrow.fingerprint_of(self.repository, self.config, self.revision, data._fingerprint),
            ids=self.id,
            folder=Path(datasets.config.HF_CACHE_HOME),  # images among what it downloads
        )

    def _loaded(self, split: str | None, name: str) -> Any:
        """One split, or for None all splits by name."""
        import datasets
        from huggingface_hub import constants

        constants.HF_HUB_DISABLE_TELEMETRY = True
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
        try:
            return datasets.load_dataset(self.repository, self.config, split=split, revision=self.revision)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            reason = " ".join(str(error).split())
            what = f"source '{name}': cannot load '{self.repository}' (config {self.config}, split '{split}'): "
            raise DataError(f"{what}{reason}; check names and connection, or use a local 'parquet' source") from error
