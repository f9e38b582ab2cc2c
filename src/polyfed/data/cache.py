"""Caches in the folder that all runs of a machine share: decoded pictures, frozen features, a few integers.

What a cached file depends on is part of its name, and a file under its final name is complete, whatever was killed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from jaxtyping import UInt8

from polyfed.core.activity import prepared
from polyfed.core.errors import DataError
from polyfed.core.files import write_atomically
from polyfed.data.arrow import fingerprint_of
from polyfed.data.images import PIXELS, ImageFit, MaskResampling, Resampling, decode, picture_bytes, reason_of
from polyfed.data.source import Column


class CacheFullError(DataError):
    """The disk of the cache has no room for a file."""


CHUNK_ITEMS = 512  # pictures decoded at a time: bounds memory, and keeps the temporary file's time stamp fresh
_STALE = 3600.0  # seconds after which nobody can still be writing a temporary file
_VERSION = 1  # raise when decoding changes what it returns


def decoded(
    column: Column,
    size: int,
    cache: Path,
    fit: ImageFit = "squash",
    resampling: Resampling | MaskResampling = "bicubic",
    pixels: int = PIXELS,
) -> UInt8[np.ndarray, "n 3 size size"]:
    """Pictures of a column (nested columns flattened), decoded once and then read from a memory map.

    The layout is channels first: gathering a batch and converting it to float takes half the time of channels
    last. The file is written under a temporary name and renamed, so processes that race for the same one all succeed.

    Args:
        column: image structs {bytes, path}, or encoded bytes.
        size: height and width in pixels.
        cache: folder of the cache; made if it is not there.
        fit: see ``decode``.
        resampling: see ``decode``.
        pixels: most pixels of a picture.

    Raises:
        DataError: a picture cannot be decoded, is too large or lies outside the data set (names row and path), or the
            folder cannot be written.
    """
    stamp = fingerprint_of(_VERSION, column.fingerprint, size, fit, resampling)
    path = cache / f"images-{size}-{fit}-{stamp}.npy"
    with usable(cache):
        pictures = _opened(path)
    if pictures is None:
        values = column.flat_values()
        with usable(cache), _replacing(path) as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(values), 3, size, size)}
            np.lib.format.write_array_header_1_0(file, header)
            for chunk in _decoded_chunks(values, column, Decoding(size, fit, resampling, pixels)):
                file.write(chunk.tobytes())
        pictures = _opened(path)
    if pictures is None:
        raise _unusable(cache, "what was written there cannot be read back")
    return pictures


def kept_numbers(path: Path, compute: Callable[[], npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """Numbers kept at ``path``, computed if they are not there or damaged.

    Raises:
        DataError: the folder cannot be written, or has no room.
    """
    with usable(path.parent):
        numbers = _opened(path)
        if numbers is not None:
            return numbers.copy()
        numbers = compute()
        with _replacing(path) as file:
            np.save(file, numbers)
        return numbers


def _opened(path: Path) -> npt.NDArray[Any] | None:
    """The cached array, or None if it is not there or damaged."""
    try:
        # as a plain array: to index a memmap itself runs Python code of numpy's for every batch
        return np.asarray(np.load(path, mmap_mode="r"))
    except (FileNotFoundError, NotADirectoryError, ValueError, EOFError):
        return None


class Decoding(NamedTuple):
    """How pictures are decoded, see ``decoded``."""

    size: int
    fit: ImageFit
    resampling: Resampling | MaskResampling
    pixels: int


@dataclass(frozen=True)
class Undecoded:
    """Pictures [n, 3, size, size] of a column that are decoded when they are first asked for."""

    column: Column
    how: Decoding
    kept: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.column.flat_values())

    def __getitem__(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        new = np.array([row for row in np.unique(rows).tolist() if row not in self.kept], dtype=np.int64)
        for row, entry in zip(new.tolist(), self.column.take(new).to_pylist(), strict=True):
            self.kept[row] = _picture(self.column, row, entry, self.how)
        return np.stack([self.kept[row] for row in rows.tolist()])


def _picture(column: Column, row: int, entry: Any, how: Decoding) -> npt.NDArray[np.uint8]:
    try:
        return decode(picture_bytes(entry, column.folder, how.pixels), *how)
    except Exception as error:  # Pillow's decoders raise errors of many kinds
        raise unreadable(column, row, entry, error, "not a readable picture") from error


def _decoded_chunks(values: pa.ChunkedArray, column: Column, how: Decoding) -> Iterator[npt.NDArray[np.uint8]]:
    def picture(row: int) -> npt.NDArray[np.uint8]:
        return _picture(column, row, values[row].as_py(), how)

    # Pillow lets go of the interpreter lock while it decodes and resizes
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        starts = range(0, len(values), CHUNK_ITEMS)  # mapping all at once would decode far ahead of the file
        rows = (range(start, min(start + CHUNK_ITEMS, len(values))) for start in starts)
        pictures = (pixels for chunk in rows for pixels in pool.map(picture, chunk))
        counted = prepared(f"decoding pictures ({column.where})", pictures, len(values))
        while chunk := list(islice(counted, CHUNK_ITEMS)):
            yield np.stack(chunk)


def unreadable(column: Column, row: int, entry: Any, error: Exception, what: str) -> DataError:
    """The error for flat value ``row`` of a column, with its place, its path and what is wrong with it."""
    path = entry.get("path") if isinstance(entry, dict) else None
    named = f" (path '{path}')" if path else ""
    return DataError(f"{column.place_of(row)}{named}: {what}: {reason_of(error)}; mend or leave out the row")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file next to ``path`` that takes its place at the end, or vanishes on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*.tmp"):  # by killed processes
        with contextlib.suppress(OSError):  # another process may be as quick
            if time.time() - left.stat().st_mtime > _STALE:
                left.unlink()
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def remembered(path: Path, compute: Callable[[], list[int]]) -> list[int]:
    """A few integers kept as JSON at ``path``, computed if they are not there or damaged.

    Raises:
        DataError: the folder cannot be written.
    """
    with contextlib.suppress(OSError, ValueError):
        numbers = json.loads(path.read_text())
        if isinstance(numbers, list):
            return numbers
    numbers = compute()
    with usable(path.parent):
        write_atomically(path, json.dumps(numbers).encode())
    return numbers


@contextlib.contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Errors of files within the block say which setting gives the cache another folder.

    Raises:
        CacheFullError: its disk is full.
        DataError: it cannot be used for another reason.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise _unusable(folder, error, CacheFullError if full else DataError) from error


def _unusable(folder: Path, reason: object, kind: type[DataError] = DataError) -> DataError:
    return kind(f"cache folder '{folder}' cannot be used ({reason}); set data.cache_dir or POLYFED_CACHE")
