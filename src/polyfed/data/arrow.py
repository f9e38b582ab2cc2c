"""Arrow types and values: lists, texts, missing values, names of classes, and keys of what was read."""

from __future__ import annotations

import functools
import hashlib
import io
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from polyfed.core.errors import DataError
from polyfed.core.untrusted import file_json

MaxBytes = Annotated[
    int | None,
    Field(ge=1, description="bytes of memory that a column may take; None: those of 64 times its files, or 1 GiB"),
]
Mask = npt.NDArray[np.bool_]
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""Type of images and recordings: bytes, or the path of a file."""


def is_list(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype))


def is_text(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype))


def is_file(dtype: pa.DataType) -> bool:
    """True for images or recordings {bytes, path}, which may name files."""
    return pa.types.is_struct(dtype) and {"bytes", "path"} <= {part.name for part in dtype}


def innermost(dtype: pa.DataType) -> pa.DataType:
    """Type of the values inside (nested) lists; any other type itself."""
    while is_list(dtype):
        dtype = dtype.value_type
    return dtype


def plain_type(dtype: pa.DataType) -> pa.DataType:
    """Type of the values themselves, for categories and string or binary views."""
    views = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    return plain_type(dtype.value_type) if pa.types.is_dictionary(dtype) else views.get(dtype, dtype)


def lacking(values: pa.ChunkedArray) -> Mask:
    """True where an entry is null or a blank text, or a list that is empty or has such an entry.

    A struct, such as an image, is null also where all its fields are.
    """
    dtype = values.type
    if is_list(dtype):
        lengths = list_lengths(values)
        missing: Mask = lengths == 0
        missing[np.repeat(np.arange(len(lengths)), lengths)[lacking(pc.list_flatten(values))]] = True
        return missing
    null = values.is_null()
    if is_text(dtype):
        null = pc.or_kleene(null, pc.equal(pc.utf8_trim_whitespace(values), ""))
    elif pa.types.is_struct(dtype) and dtype.num_fields:
        # parts of a null struct read as null too
        null = functools.reduce(pc.and_, [pc.struct_field(values, part.name).is_null() for part in dtype])
    return null.to_numpy().astype(np.bool_)  # type: ignore[no-any-return]


def unless_blank(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.if_else(pc.equal(pc.utf8_trim_whitespace(texts), ""), pa.scalar(None, texts.type), texts)


def empty(values: pa.ChunkedArray) -> Mask:
    """True where an entry is null or a blank text, or a list with only such entries."""
    if not is_list(values.type):
        return lacking(values)
    lengths = list_lengths(values)
    there = np.repeat(np.arange(len(lengths)), lengths)[~lacking(pc.list_flatten(values))]
    nothing: Mask = np.bincount(there, minlength=len(lengths)) == 0
    return nothing


def list_lengths(values: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Number of entries of each list; 0 for a null."""
    lengths: npt.NDArray[np.int64] = pc.fill_null(pc.list_value_length(values), 0).to_numpy().astype(np.int64)
    return lengths


def lists_of(flat: pa.ChunkedArray, lengths: npt.NDArray[np.int64]) -> pa.ChunkedArray:
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.chunked_array([pa.ListArray.from_arrays(pa.array(ends), flat.combine_chunks())])


def struct_part(values: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """One field of structs, or of (nested) lists of structs; a null list becomes an empty one."""
    if is_list(values.type):
        return lists_of(struct_part(pc.list_flatten(values), name), list_lengths(values))
    return pc.struct_field(values, name)


def class_names(schema: pa.Schema, where: str = "table") -> dict[str, tuple[str, ...]]:
    """Column name -> class names in label order, from the Hugging Face metadata (ClassLabel features).

    Raises:
        DataError: the metadata of the table, which is called ``where``, are not readable.
    """

    def names_of(feature: Any) -> Sequence[str]:
        # a list of classes is written as {feature: ...} or, by old versions of `datasets`, as a list of one
        if isinstance(feature, list):
            return names_of(feature[0]) if feature else ()
        if not isinstance(feature, dict):
            return ()
        if feature.get("_type") == "ClassLabel":
            return feature.get("names") or ()
        return names_of(feature.get("feature"))

    if (raw := (schema.metadata or {}).get(b"huggingface")) is None:
        return {}
    try:
        features = file_json(raw).get("info", {}).get("features", {})
        return {column: tuple(names) for column, feature in features.items() if (names := names_of(feature))}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{where}: metadata 'huggingface', with names of classes, cannot be read: {error}") from error


def fingerprint_of(*parts: object) -> str:
    """16 hexadecimal digits that depend on every part and on their order."""
    # the separator occurs in no part, so that ("a", "bc") and ("ab", "c") differ
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:16]


def file_key(file: Path) -> str:
    """Path, size, times and inode of a file: a file that took the place of another, of equal size and time, differs."""
    status = file.stat()
    return f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def mask_key(rows: Mask) -> str:
    """Hexadecimal digest of a choice of rows."""
    return hashlib.sha256(np.packbits(rows).tobytes()).hexdigest()


def content_key(values: pa.ChunkedArray | pa.Table, folder: Path | None = None) -> str:
    """Hexadecimal digest of the type and the values of a column or table, and of the files that its images name.

    Args:
        values: whatever their chunks.
        folder: in which named files lie; None: they name none.
    """
    table = values if isinstance(values, pa.Table) else pa.table({"": values})
    digest = hashlib.sha256()
    with pa.ipc.new_stream(pa.PythonFile(_Hashing(digest), "w"), table.schema.remove_metadata()) as writer:
        # one chunk: how rows are chunked must not matter
        writer.write_table(table.replace_schema_metadata().combine_chunks())
    for column in table.columns:
        digest.update(named_files_key(column, folder).encode() if folder else b"")
    return digest.hexdigest()


def named_files_key(values: pa.ChunkedArray, folder: Path) -> str:
    """Key of the files in a folder that images or recordings {bytes, path} without bytes name; else empty."""
    if is_list(values.type):
        return named_files_key(pc.list_flatten(values), folder)
    if not is_file(values.type):
        return ""
    paths = pc.struct_field(values, "path").filter(pc.struct_field(values, "bytes").is_null()).drop_null()
    files = [folder / path for path in paths.unique().to_pylist()]
    return fingerprint_of(*(file_key(file) if file.exists() else file for file in files)) if files else ""


class _Hashing(io.RawIOBase):
    """A file whose content is hashed and not kept."""

    def __init__(self, digest: Any) -> None:
        self._hash = digest

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._hash.update(content)
        return len(content)


def most_bytes(files: Iterable[Path], given: int | None) -> int:
    """Limit in bytes that ``MaxBytes`` stands for with these files."""
    return given or max(1 << 30, 64 * sum(file.stat().st_size for file in files))


def require_bytes(needed: int, most: int, where: str) -> None:
    """Raise DataError unless so many bytes of memory may be taken."""
    if needed > most:
        raise DataError(f"{where}: {needed:,} bytes in memory or more, the limit is {most:,} (max_bytes of the source)")


def ipc_stream(file: Path) -> pa.NativeFile:
    """The messages of a file, mapped into memory: one of the format with random access (Feather) holds a stream."""
    source = pa.memory_map(str(file))
    source.seek(8 if source.read(6) == b"ARROW1" else 0)
    return source


def unpacked_bytes(file: Path) -> int:
    """Bytes of memory that the compressed buffers of a file take, from the length that is stored before each.

    A buffer never becomes longer than that, so none has to be decompressed to find out.

    Raises:
        DataError: the layout of a message is damaged.
    """
    total = 0
    try:
        for message in pa.ipc.MessageReader.open_stream(ipc_stream(file)):
            lengths = _buffers(message) if message.type in ("record batch", "dictionary") else ()
            total += sum(max(0, _number("<q", message.body, start)) for start, length in lengths if length)
    except pa.ArrowException:  # reading the file stops there too
        return total
    except struct.error as error:
        raise DataError(f"'{file}': damaged ({error}); fetch the file again") from error
    return total


def _buffers(message: pa.ipc.Message) -> Iterator[tuple[int, int]]:
    """Start and length of each compressed buffer of a message; see Message.fbs of Arrow."""
    data = message.metadata

    def table(place: int, number: int) -> int:
        """Position that a field of a FlatBuffers table refers to; 0: the field is missing."""
        fields = place - _number("<i", data, place)
        entry = 4 + 2 * number
        offset = _number("<H", data, fields + entry) if entry < _number("<H", data, fields) else 0
        return place + offset + _number("<I", data, place + offset) if offset else 0

    batch = table(_number("<I", data, 0), 2)
    if message.type == "dictionary":
        batch = table(batch, 1)
    buffers = table(batch, 2)
    if table(batch, 3) and buffers:
        for place in range(buffers + 4, buffers + 4 + 16 * _number("<I", data, buffers), 16):
            yield _number("<q", data, place), _number("<q", data, place + 8)


def _number(form: str, data: pa.Buffer, place: int) -> int:
    number: int = struct.unpack_from(form, data, place)[0]
    return number


def bounded(batches: Iterable[pa.RecordBatch], most: int, where: str) -> Iterator[pa.RecordBatch]:
    """The batches as they come, valid ones, as long as all of them take no more than so many bytes.

    Raises:
        DataError: they take more, or one is damaged: a text that is not UTF-8, an offset beyond the data.
    """
    taken = 0
    try:
        for batch in batches:
            batch.validate(full=True)
            taken += batch.nbytes
            require_bytes(taken, most, where)
            yield batch
    except (IndexError, pa.ArrowException) as error:
        raise DataError(f"{where}: damaged ({' '.join(str(error).split())}); fetch the file again") from error


def column_of(data: Any, name: str) -> pa.ChunkedArray:
    """All values of a column of a table or ``datasets.Dataset``, in the order of its rows, undecoded."""
    return (data if isinstance(data, pa.Table) else data.select_columns([name]).with_format("arrow")[:]).column(name)


def joined(parts: Iterable[pa.ChunkedArray]) -> pa.ChunkedArray:
    """A column of all splits: class numbers of texts must not depend on which split is opened."""
    columns = list(parts)
    return pa.chunked_array([chunk for values in columns for chunk in values.chunks], columns[0].type)
