"""Caches in the folder that all runs of a machine share: decoded images, rows that take long to compute, digests.

The name of a cached file holds a digest of everything that the file depends on, and a file under its final name is
complete, whichever process was killed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from filelock import FileLock, Timeout
from jaxtyping import Float, Float16, Int64, UInt8
from torch import Tensor

from polyfed.core.activity import prepared, preparing
from polyfed.core.errors import ConfigError, DataError, PolyfedError
from polyfed.core.files import write_atomically
from polyfed.data.arrow import fingerprint_of
from polyfed.data.device_memory import TableInputs
from polyfed.data.images import PIXELS, ImageFit, MaskResampling, Resampling, decode, image_bytes, reason_of
from polyfed.data.source import Column, Count, LeftOut, Split
from polyfed.data.view import DataContext


class CacheFullError(DataError):
    """A full disk in the cache folder."""


CHUNK_ITEMS = 512  # images decoded at a time: bounds memory, and keeps the temporary file's time stamp fresh
_STALE = 3600.0  # seconds after which no process is still writing a temporary file
_VERSION = 1  # raise when decoding changes what it returns


class Decoding(NamedTuple):
    """Arguments of ``decode``."""

    size: int
    fit: ImageFit = "squash"
    resampling: Resampling | MaskResampling = "bicubic"
    pixels: int = PIXELS


def decoded(column: Column, how: Decoding, cache: Path) -> UInt8[np.ndarray, "n 3 size size"]:
    """Images of a column (nested columns flattened), decoded once and then read from a memory map.

    The layout is channels first: gathering a batch and converting it to float takes half the time of channels
    last. The file is written under a temporary name and renamed, so processes that race for the same one all succeed.

    Args:
        column: image structs {bytes, path}, or encoded bytes.
        how: size, fit, filter and limit of pixels.
        cache: folder of the cache; made if it does not exist.

    Raises:
        DataError: an image cannot be decoded, is too large or lies outside the data set (names row and path), or the
            folder cannot be written.
    """
    stamp = fingerprint_of(_VERSION, column.fingerprint, *how[:3])
    path = cache / f"images-{how.size}-{how.fit}-{stamp}.npy"
    with usable(cache):
        images = _opened(path)
    if images is None:
        values = column.flat_values()
        with usable(cache), _replacing(path) as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(values), 3, how.size, how.size)}
            np.lib.format.write_array_header_1_0(file, header)
            for chunk in _decoded_chunks(values, column, how):
                file.write(chunk.tobytes())
        images = _opened(path)
    if images is None:
        raise _unusable(cache, "a file written there cannot be read back")
    return images


def kept_numbers(path: Path, compute: Callable[[], npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """Numbers kept at ``path``, computed if the file is missing or damaged.

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
    """Cached array; None if the file is missing or damaged."""
    try:
        # as a plain array: indexing a memmap runs Python code of numpy for every batch
        return np.asarray(np.load(path, mmap_mode="r"))
    except (FileNotFoundError, NotADirectoryError, ValueError, EOFError):
        return None


@dataclass(frozen=True)
class Undecoded:
    """Images [n, 3, size, size] of a column that are decoded at first use."""

    column: Column
    how: Decoding
    kept: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.column.flat_values())

    def __getitem__(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        new = np.array([row for row in np.unique(rows).tolist() if row not in self.kept], dtype=np.int64)
        for row, entry in zip(new.tolist(), self.column.take(new).to_pylist(), strict=True):
            self.kept[row] = _image(self.column, row, entry, self.how)
        return np.stack([self.kept[row] for row in rows.tolist()])


def _image(column: Column, row: int, entry: Any, how: Decoding) -> npt.NDArray[np.uint8]:
    try:
        return decode(image_bytes(entry, column.folder, how.pixels), *how)
    except Exception as error:  # Pillow's decoders raise errors of many types
        raise unreadable(column, row, entry, error, "not a readable image") from error


def _decoded_chunks(values: pa.ChunkedArray, column: Column, how: Decoding) -> Iterator[npt.NDArray[np.uint8]]:
    def image(row: int) -> npt.NDArray[np.uint8]:
        return _image(column, row, values[row].as_py(), how)

    # Pillow releases the interpreter lock while it decodes and resizes
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        starts = range(0, len(values), CHUNK_ITEMS)  # mapping all at once would decode far ahead of the file
        rows = (range(start, min(start + CHUNK_ITEMS, len(values))) for start in starts)
        images = (pixels for chunk in rows for pixels in pool.map(image, chunk))
        counted = prepared(f"decoding images ({column.where})", images, len(values))
        while chunk := list(islice(counted, CHUNK_ITEMS)):
            yield np.stack(chunk)


def unreadable(column: Column, row: int, entry: Any, error: Exception, what: str) -> PolyfedError:
    """The error for flat value ``row`` of a column, with its position, its path and the reason."""
    if isinstance(error, ConfigError):
        return error  # a missing extra is not a fault of the value
    path = entry.get("path") if isinstance(entry, dict) else None
    named = f" (path '{path}')" if path else ""
    return DataError(f"{column.place_of(row)}{named}: {what}: {reason_of(error)}; mend or leave out the row")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that is renamed to ``path`` at the end, or removed on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*.tmp"):  # left by killed processes
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
    """A few integers kept as JSON at ``path``, computed if the file is missing or damaged.

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


def cut_count(unit: str, context: DataContext, stamp: str, lengths: Callable[[], Sequence[int]], most: int) -> Count:
    """Count of the units of values that are cut to ``most`` units each; kept in the cache if ``context.ahead``.

    Args:
        unit: tokens, or frames.
        context: Context with the cache folder.
        stamp: Digest of everything that the lengths depend on, and of ``most``.
        lengths: Returns the units of each value before any is cut.
        most: Units of a value that are read.
    """

    def compute() -> list[int]:
        units = np.asarray(lengths(), np.int64)
        longest = int(units.max(initial=0))
        return [int(units.sum()), int(np.minimum(units, most).sum()), int((units > most).sum()), longest]

    total, read, cut, longest = remembered(context.cache / f"cut-{stamp}.json", compute) if context.ahead else compute()
    values = f"cut off {cut:,} values longer than {most}; the longest has {longest}"
    return Count.of(unit, total, read, [LeftOut(values, total - read)])


@contextlib.contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Turn file errors within the block into errors that name the setting for another cache folder.

    Raises:
        CacheFullError: its disk is full.
        DataError: it cannot be used for another reason.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise _unusable(folder, error, CacheFullError if full else DataError) from error


def _unusable(folder: Path, reason: object, error_class: type[DataError] = DataError) -> DataError:
    return error_class(f"cache folder '{folder}' cannot be used ({reason}); set data.cache_dir or POLYFED_CACHE")


# ---- digests of what columns hold, equal wherever the same content lies: images as encoded bytes, texts as they are

_DIGEST_VERSION = 1  # raise when the same content gives another digest


def content_digests(split: Split, items: Int64[Tensor, " n"], context: DataContext) -> list[str]:
    """Names of all modalities of a split with the digests of some items in them; see ``content_digest``."""
    return [f"{name} {content_digest(split.modality(name), context, items)}" for name in sorted(split.columns)]


def content_digest(column: Column, context: DataContext, items: Int64[Tensor, " n"] | None = None) -> str:
    """Digest of some items of a column, or of all, computed once and kept in the cache.

    A generated column is identified by its recipe: other versions of encoders write the same pixels as other bytes.

    Raises:
        DataError: an image cannot be read (names row and path), or the cache cannot be written.
    """
    chosen = "all" if items is None else hashlib.sha256(items.numpy().tobytes()).hexdigest()
    # a digest of pixels would need all images to be drawn
    if column.recipe:
        return fingerprint_of(column.recipe, chosen)
    path = context.cache / f"content-{fingerprint_of(_DIGEST_VERSION, column.fingerprint, chosen)}.json"

    def compute() -> list[int]:
        digest, values = hashlib.blake2b(digest_size=16), column.values
        chosen = torch.arange(len(values)) if items is None else items
        for start in range(0, len(chosen), CHUNK_ITEMS):
            rows = chosen[start : start + CHUNK_ITEMS].numpy()
            for row, value in zip(rows.tolist(), values.take(pa.array(rows)).to_pylist(), strict=True):
                try:
                    for part in _parts(value, column, context.pixels):
                        digest.update(part)
                except (OSError, ValueError) as error:
                    raise DataError(f"{column.where}, row {row}: {error}; mend or leave out the row") from error
        return list(digest.digest())

    return bytes(remembered(path, compute)).hex()


def _parts(value: Any, column: Column, pixels: int) -> Iterator[bytes]:
    """Bytes that identify a value."""
    if isinstance(value, dict) and not value.keys() - {"bytes", "path"}:
        value = image_bytes(value, column.folder, pixels)
    if isinstance(value, dict):
        value = [entry for item in sorted(value.items()) for entry in item]
    if isinstance(value, list):
        # lengths precede contents, so that ["ab", "c"] and ["a", "bc"] differ
        yield b"list %d " % len(value)
        for entry in value:
            yield from _parts(entry, column, pixels)
    else:
        content = value if isinstance(value, bytes) else str(value).encode()
        yield b"%s %d " % (type(value).__name__.encode(), len(content))
        yield content


# ---- rows that take long to compute

_log = logging.getLogger(__name__)

_Rows = npt.NDArray[np.int64]
_Values = npt.NDArray[np.float16]


@dataclass
class StoredRows(TableInputs):
    """Opened rows, float32 [b, ...], stored as float16 [n, ...] in a file.

    Until all rows are computed they are in ``path.rows``, and ``path.there`` has one byte per row, set when the row
    is on disk; with the last row the file gets its final name. One process writes at a time. On a full disk, rows
    are computed for every batch, rounded as those in the file are.

    Attributes:
        path: File of the rows; its name must hold a digest of everything that they depend on.
        shape: Returns the shape of all rows, (n, ...); called if no file has it.
        compute: Row numbers -> rows [k, ...], whose bits must not depend on the rows that are computed together.
        what: Name of the rows, for displays and logs.
        ahead: True if ``prepare`` computes; else rows are computed at first use.
        group: Rows that are written together; an interruption loses at most so many.
    """

    path: Path
    shape: Callable[[], tuple[int, ...]]
    compute: Callable[[Sequence[int]], Tensor]
    what: str
    ahead: bool = True
    group: int = 256
    _has_room: bool = field(default=True, init=False)

    def __len__(self) -> int:
        return len(self._values) if self._has_room else self.shape()[0]

    @property
    def table(self) -> _Values | None:
        """All rows, once they are in the file."""
        self._require(np.empty(0, np.int64))
        return self._values if self._has_room and (self._there is None or self._there.all()) else None

    def gathered(self, rows: Int64[Tensor, " b"]) -> Float16[Tensor, "b ..."]:
        """The rows, computed if they are missing.

        Raises:
            DataError: a row is not finite in float16, or the folder cannot be written.
        """
        self._require(rows.numpy())
        if self._has_room:
            return torch.from_numpy(self._values[rows.numpy()])
        distinct, inverse_index = torch.unique(rows, return_inverse=True)
        return self.compute(distinct.tolist()).half()[inverse_index]

    def computed(self, x: Tensor, *draws: Tensor) -> Float[Tensor, "b ..."]:
        """The rows; the same with and without a generator."""
        return x.float()

    def prepare(self, rows: Int64[Tensor, " n"]) -> None:
        """Compute and keep ``rows`` ahead of their use; errors as above."""
        if self.ahead:
            self._require(rows.numpy())

    def _require(self, rows: _Rows) -> None:
        try:
            if self._has_room and len(missing := self._missing(rows)):
                with usable(self.path.parent), self._lock():
                    self._fill(self._missing(missing))  # another process may have computed some meanwhile
        except CacheFullError as error:
            _log.warning("%s are computed anew for every batch: %s", self.what, error)
            self._has_room = False

    # ---- what is there

    @cached_property
    def _there(self) -> npt.NDArray[np.uint8] | None:
        """Marks of the rows that exist, as all processes write them; None: all rows exist."""
        if self._values.size == 0 or self.path.exists():
            return None
        try:
            return np.asarray(np.memmap(self._beside(".there"), np.uint8, mode="r"))
        except FileNotFoundError:  # completed meanwhile
            return None

    @cached_property
    def _values(self) -> _Values:
        with usable(self.path.parent):
            known = self._opened()
            if known is None:
                shape = self.shape()
                if shape[0] == 0:
                    return np.zeros(shape, np.float16)
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self._lock():
                    known = self._opened()
                    known = self._begun(shape) if known is None else known
        return known

    def _opened(self) -> _Values | None:
        """The rows as a memory map, zero where missing; None if the files are missing or damaged."""
        with contextlib.suppress(FileNotFoundError):
            return self._mapped(self.path)
        with contextlib.suppress(OSError, DataError):
            rows = self._mapped(self._beside(".rows"))
            return rows if self._beside(".there").stat().st_size == len(rows) else None
        return self._mapped(self.path) if self.path.exists() else None  # another process completed it meanwhile

    def _mapped(self, path: Path) -> _Values:
        try:
            rows: _Values = np.asarray(np.load(path, mmap_mode="r"))
        except ValueError as error:
            raise DataError(f"cached features '{path}' are damaged ({error}); delete the file") from error
        if rows.dtype != np.float16:
            raise DataError(f"cached features '{path}' are {rows.dtype}, not float16; delete the file")
        return rows

    def _begun(self, shape: tuple[int, ...]) -> _Values:
        """Sparse files of a shape, without any row."""
        rows, there = self._beside(".rows"), self._beside(".there")
        for path in (there, rows):  # damaged ones
            path.unlink(missing_ok=True)
        with rows.open("wb") as file:
            header = {"descr": "<f2", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 2 * int(np.prod(shape)))
        with there.open("wb") as file:  # last, as it marks the other file as usable
            file.truncate(shape[0])
        return self._mapped(rows)

    def _missing(self, rows: _Rows) -> _Rows:
        """Rows that are missing, without repetition, ascending."""
        return np.unique(rows[self._there[rows] == 0] if self._there is not None else rows[:0])

    def _beside(self, suffix: str) -> Path:
        return self.path.with_suffix(suffix)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        lock = FileLock(self._beside(".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            preparing(f"waiting for another process, which holds the lock '{lock.lock_file}'")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    # ---- computing

    def _fill(self, missing: _Rows) -> None:
        """Compute and write missing rows; called with the lock held."""
        if len(missing) == 0:
            return
        begun, rows, there = time.monotonic(), self._beside(".rows"), self._beside(".there")
        groups = [missing[start : start + self.group] for start in range(0, len(missing), self.group)]
        with rows.open("r+b", buffering=0) as file, there.open("r+b", buffering=0) as marks:
            for group in prepared(f"encoding {self.what}", groups, len(missing), size=self.group):
                self._write(group, file.fileno(), marks.fileno())
        _log.info("%s: %d rows encoded in %.0f s", self.what, len(missing), time.monotonic() - begun)
        if np.fromfile(there, np.uint8).all():
            rows.replace(self.path)
            there.unlink()

    def _write(self, rows: _Rows, file: int, marks: int) -> None:
        size = self._values[0].nbytes
        start = os.fstat(file).st_size - self._values.nbytes
        for row in rows.tolist() if hasattr(os, "posix_fallocate") else ():
            os.posix_fallocate(file, start + row * size, size)  # a full disk fails before the work
        values: _Values = self.compute(rows.tolist()).detach().cpu().half().numpy()
        finite = np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if not finite.all():
            row = int(rows[np.argmin(finite)])
            raise DataError(f"{self.what}: row {row} is not finite in float16; check the backbone and that row")
        for row, value in zip(rows.tolist(), values, strict=True):
            os.pwrite(file, value.tobytes(), start + row * size)
        os.fsync(file)
        for row in rows.tolist():  # only now: a killed process leaves no mark without its row
            os.pwrite(marks, b"\1", row)
