"""Caches in the folder that all runs of a machine share: decoded pictures, frozen features, a few integers.

What a cached file depends on is part of its name, and a file under its final name is complete, whatever was killed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from filelock import FileLock
from jaxtyping import UInt8
from torch import Tensor

from polyfed.core.activity import prepared
from polyfed.core.errors import DataError
from polyfed.core.files import write_atomically
from polyfed.data.arrow import fingerprint_of
from polyfed.data.pictures import PIXELS, ImageFit, Resampling, decode, picture_bytes, reason_of
from polyfed.data.source import Column

_log = logging.getLogger(__name__)

FeatureRows = npt.NDArray[np.float16]


class CacheFullError(DataError):
    """The disk of the cache has no room for a file."""


CHUNK_ITEMS = 512  # pictures decoded at a time: bounds memory, and keeps the temporary file's time stamp fresh
_STALE = 3600.0  # seconds after which nobody can still be writing a temporary file
_VERSION = 1  # raise when decoding changes what it returns
_REPORT_SECONDS = 10.0


def decoded(
    column: Column,
    size: int,
    cache: Path,
    fit: ImageFit = "squash",
    resampling: Resampling = "bicubic",
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
    with _usable(cache):
        pictures = _opened_pictures(path)
    if pictures is None:
        values = column.flat_values()
        with _usable(cache), _replacing(path) as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(values), 3, size, size)}
            np.lib.format.write_array_header_1_0(file, header)
            for chunk in _decoded_chunks(values, column, (size, fit, resampling, pixels)):
                file.write(chunk.tobytes())
        pictures = _opened_pictures(path)
    if pictures is None:
        raise _unusable(cache, "what was written there cannot be read back")
    return pictures


def _opened_pictures(path: Path) -> npt.NDArray[np.uint8] | None:
    """The cached array, or None if it is not there or damaged."""
    try:
        # as a plain array: to index a memmap itself runs Python code of numpy's for every batch
        return np.asarray(np.load(path, mmap_mode="r"))
    except (FileNotFoundError, NotADirectoryError, ValueError, EOFError):
        return None


def _decoded_chunks(
    values: pa.ChunkedArray, column: Column, how: tuple[int, ImageFit, Resampling, int]
) -> Iterator[npt.NDArray[np.uint8]]:
    def picture(row: int) -> npt.NDArray[np.uint8]:
        entry = values[row].as_py()
        try:
            return decode(picture_bytes(entry, column.folder, how[-1]), *how)
        except Exception as error:  # Pillow's decoders raise errors of many kinds
            raise unreadable(column, row, entry, error, "not a readable picture") from error

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


def stored(
    path: Path,
    shape: Callable[[], tuple[int, ...]],
    compute: Callable[[int, int], Tensor],
    *,
    chunk: int = 256,
) -> FeatureRows:
    """The rows at ``path``, computed if they are not there: float16 [n, ...], a read-only memory map.

    Until the file is complete the rows stand in ``path.part``, and ``path.done`` counts those that are there: an
    interrupted computation goes on from that chunk. One process computes, others wait. Nothing is called if the rows
    are there.

    Args:
        path: file to keep the rows in; what they depend on must be part of its name.
        shape: gives the shape of all rows, (n, ...).
        compute: rows ``start`` to ``stop`` -> [stop - start, ...].
        chunk: rows to compute at a time; so many are lost at most when it is interrupted.

    Raises:
        CacheFullError: there is no room for the rows; none were computed.
        DataError: a row is not finite in float16, or the folder cannot be written.
    """
    with _usable(path.parent):
        if not path.exists():
            size = shape()
            if size[0] == 0:
                return np.zeros(size, np.float16)
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                if not path.exists():
                    _fill(path, size, compute, chunk)
        try:
            rows: FeatureRows = np.asarray(np.load(path, mmap_mode="r"))
        except ValueError as error:
            raise DataError(f"cached features '{path}' are damaged ({error}); delete the file") from error
    if rows.dtype != np.float16:
        raise DataError(f"cached features '{path}' are {rows.dtype}, not float16; delete the file")
    return rows


def _fill(path: Path, shape: tuple[int, ...], compute: Callable[[int, int], Tensor], chunk: int) -> None:
    part, done = path.with_suffix(".part"), path.with_suffix(".done")
    start, total = _rows_done(part, done, shape), shape[0]
    if not start:
        _reserve(part, shape)
    rows = np.lib.format.open_memmap(part, mode="r+", dtype=np.float16, shape=shape)
    began = reported = time.monotonic()
    firsts = range(start, total, chunk)
    for first in prepared(f"caching features ({path.stem})", firsts, total, size=chunk, before=start):
        last = min(first + chunk, total)
        rows[first:last] = _finite(compute(first, last), first, path.stem)
        rows.flush()
        write_atomically(done, json.dumps({"rows": last, "shape": shape}).encode())
        now = time.monotonic()
        if last == total or now - reported >= _REPORT_SECONDS:
            rate = (last - start) / max(now - began, 1e-9)
            _log.info("%s: %d of %d rows, %.1f rows/s", path.stem, last, total, rate)
            reported = now
    del rows
    part.replace(path)
    done.unlink(missing_ok=True)


def _reserve(part: Path, shape: tuple[int, ...]) -> None:
    """An array of a shape, not yet filled, whose room on the disk is taken: without, writing to the map is fatal."""
    np.lib.format.open_memmap(part, mode="w+", dtype=np.float16, shape=shape)
    if hasattr(os, "posix_fallocate"):
        try:
            with part.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, part.stat().st_size)
        except OSError:
            part.unlink()
            raise


def _rows_done(part: Path, done: Path, shape: tuple[int, ...]) -> int:
    """Rows that an interrupted computation left in ``part``."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        state = json.loads(done.read_text())
        rows = np.load(part, mmap_mode="r")
        if rows.shape == shape == tuple(state["shape"]) and rows.dtype == np.float16:
            return int(state["rows"])
    return 0


def _finite(values: Tensor, first: int, name: str) -> FeatureRows:
    rows: FeatureRows = values.detach().cpu().half().numpy()
    good = np.isfinite(rows).reshape(len(rows), -1).all(axis=1)
    if not good.all():
        row = first + int(np.argmin(good))
        raise DataError(f"{name}: features of row {row} are not finite in float16; check the backbone and that row")
    return rows


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
    with _usable(path.parent):
        write_atomically(path, json.dumps(numbers).encode())
    return numbers


@contextlib.contextmanager
def _usable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise _unusable(folder, error, CacheFullError if full else DataError) from error


def _unusable(folder: Path, reason: object, kind: type[DataError] = DataError) -> DataError:
    return kind(f"cache folder '{folder}' cannot be used ({reason}); set data.cache_dir or POLYFED_CACHE")
