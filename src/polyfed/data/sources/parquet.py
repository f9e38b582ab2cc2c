"""A local folder of Parquet files in the Hugging Face layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from polyfed.core.errors import DataError, nearest
from polyfed.data.arrow import fingerprint_of_files, innermost, split_of_table
from polyfed.data.source import OTHER_LAYOUTS, Split, TableSource, folder_of, is_text

_FILE = re.compile(r"(?P<split>\w+)(-(?P<shard>\d+)-of-(?P<shards>\d+)(-\w+)?)?\.parquet")


class Parquet(TableSource):
    """A folder with ``<split>.parquet`` or ``<split>-00000-of-00002.parquet``, ... for every split.

    Only the columns that are asked for are read. Class names come from the files' Hugging Face metadata. Files may hold
    a column as whole numbers of different width, as texts or lists of different offsets, or as nothing but nulls.
    """

    path: str = Field(description="folder with the files: absolute, or relative to the data folder")
    id: str | None = Field(
        default=None, description="column that identifies an item; without it an id is path, split and row"
    )

    def open(self, split: str, *, name: str, data_dir: Path | None) -> Split:
        """Open one split; reads the schemas and the ids."""
        folder = folder_of(self.path, name, data_dir)
        files = _files(folder, split, f"source '{name}', path '{self.path}'")
        where = Path(self.path).as_posix()
        schema = _common_schema(files, where)

        def read(columns: list[str]) -> pa.Table:
            return _read(files, columns, where)

        return split_of_table(
            read,
            schema,
            source=name,
            split=split,
            ids_column=self.id,
            columns=self.columns,
            targets=self.targets,
            selection=self.selection(),
            fingerprint=fingerprint_of_files(files),
            where=where,
            everywhere=lambda column: _everywhere(folder, column, where),
            filled=lambda column: _filled(files, column, where),
            folder=folder,
        )


def _files(folder: Path, split: str, what: str) -> list[Path]:
    """Files of a split in shard order."""
    named = [(match, file) for file in sorted(folder.iterdir()) if (match := _FILE.fullmatch(file.name))]
    found = [(match, file) for match, file in named if match["split"] == split]
    if not named:
        raise DataError(
            f"{what}: there is no file such as train.parquet or train-00000-of-00002.parquet; {OTHER_LAYOUTS}"
        )
    if not found:
        raise DataError(f"{what}: no split '{split}'; {nearest(split, {match['split'] for match, _ in named})}")
    _require_complete([match for match, _ in found], f"{what}, split '{split}'")
    return [file for _, file in found]


def _require_complete(found: Sequence[re.Match[str]], what: str) -> None:
    """Shards 0 to n - 1 of n, each once, or a single file."""
    shards = [int(match["shard"] or 0) for match in found]
    expected = int(found[0]["shards"] or 1)
    if shards != list(range(expected)):
        names = ", ".join(match.string for match in found)
        raise DataError(f"{what}: needs exactly {expected} file(s) but has {names}; fetch or remove files")


def _schema(file: Path, where: str) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(file, where, error) from error


def _metadata(file: Path, where: str) -> pq.FileMetaData:
    try:
        return pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(file, where, error) from error


def _common_schema(files: Sequence[Path], where: str) -> pa.Schema:
    """The first file's schema, with types that hold the values of all files; a column without such is left as it is."""
    found, *others = [_schema(file, where) for file in files]
    for other in others:
        for place, field in enumerate(found):
            if other.get_field_index(field.name) >= 0:
                kind = _common(field.type, other.field(field.name).type)
                found = found.set(place, field.with_type(kind or field.type))
    return found


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """A type that holds the values of both as they are, if there is one: a whole number becomes no float or decimal."""
    if one == other:
        return one
    try:
        schemas = [pa.schema([("", kind)]) for kind in (one, other)]
        both = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None
    return both if all(_stays(innermost(kind), innermost(both)) for kind in (one, other)) else None


def _stays(kind: pa.DataType, both: pa.DataType) -> bool:
    return pa.types.is_null(kind) or all(test(kind) == test(both) for test in (pa.types.is_integer, is_text))


def _read(files: Sequence[Path], columns: list[str], where: str) -> pa.Table:
    if not columns:  # a table without columns has no rows to count
        return pa.table({"": pa.nulls(sum(_metadata(file, where).num_rows for file in files))})
    tables = [_columns(file, columns, where) for file in files]
    for column in columns:
        _require_common(files, [table.schema.field(column).type for table in tables], column, where)
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:  # a value beyond the common type
        raise DataError(
            f"{where}, {_names(files)}, column {', '.join(columns)}: the values do not fit one type "
            f"({_first_line(error)}); write all files with one type"
        ) from error


def _require_common(files: Sequence[Path], kinds: Sequence[pa.DataType], column: str, where: str) -> None:
    common, holder = kinds[0], files[0]
    for file, kind in zip(files[1:], kinds[1:], strict=True):
        both = _common(common, kind)
        if both is None:
            raise DataError(
                f"{where}/{file.name}, column '{column}': holds {kind}, but {holder.name} holds {common}; "
                "write both files with one type"
            )
        common, holder = both, holder if both == common else file


def _columns(file: Path, columns: list[str], where: str) -> pa.Table:
    try:
        return pq.read_table(file, columns=columns).select(columns)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise _unreadable(file, where, error) from error


def _everywhere(folder: Path, column: str, where: str) -> pa.ChunkedArray:
    """A column of all splits that have it."""
    files = [file for file in sorted(folder.iterdir()) if _FILE.fullmatch(file.name)]
    files = [file for file in files if column in _schema(file, where).names]
    return _read(files, [column], where).column(column)


def _filled(files: Sequence[Path], column: str, where: str) -> bool:
    """Whether the files' own statistics say that no part of a column is null: pictures need not be read for that."""
    return all(_null_free(_metadata(file, where), column) for file in files)


def _null_free(metadata: pq.FileMetaData, column: str) -> bool:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    parts = [group.column(number) for group in groups for number in range(group.num_columns)]
    own = [part for part in parts if f"{part.path_in_schema}.".startswith(f"{column}.")]  # names may have dots
    return bool(own) and all(part.is_stats_set and part.statistics.null_count == 0 for part in own)


def _unreadable(file: Path, where: str, error: Exception) -> DataError:
    return DataError(f"{where}/{file.name}: cannot be read as Parquet ({_first_line(error)}); fetch the file again")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _names(files: Sequence[Path]) -> str:
    return ", ".join(file.name for file in files)
