"""Rows that take long to compute, kept in the cache: only those that somebody needs are computed, and each once."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout
from torch import Tensor

from polyfed.core.activity import prepared, preparing
from polyfed.core.errors import DataError
from polyfed.data.cache import FeatureRows, usable

_log = logging.getLogger(__name__)

_GROUP = 256  # rows that a process takes at a time, so many are lost at most when it is interrupted
_Rows = npt.NDArray[np.int64]


@dataclass
class StoredRows:
    """The rows of a file: float16 [n, ...].

    While rows are missing they stand in ``path.rows``, and ``path.there`` has one byte for each that is there; with the
    last of them the file takes its final name. Rows are computed in blocks that begin at multiples of ``block``,
    whichever of them are asked for, as other batches may have other last bits. Processes compute in turns.

    Attributes:
        path: file to keep the rows in; what they depend on must be part of its name.
        shape: gives the shape of all rows, (n, ...); called if no file tells it.
        compute: row numbers -> rows [k, ...].
        block: rows that are computed together.
        what: is computed, for displays and logs.
    """

    path: Path
    shape: Callable[[], tuple[int, ...]]
    compute: Callable[[Sequence[int]], Tensor]
    block: int
    what: str

    def __len__(self) -> int:
        return len(self._values)

    def __call__(self, rows: _Rows) -> FeatureRows:
        """The rows, those that are missing computed now.

        Raises:
            CacheFullError: there is no room for the rows.
            DataError: a row is not finite in float16, or the folder cannot be written.
        """
        self.require(rows)
        found: FeatureRows = self._values[rows]
        return found

    def require(self, rows: _Rows) -> None:
        """Compute those of the rows that are missing; errors as above."""
        missing = rows[self._is_missing(rows)]
        if len(missing) == 0:
            return
        blocks = np.unique(missing // self.block)
        with usable(self.path.parent):
            self._fill(np.array_split(blocks, -(-len(blocks) * self.block // _GROUP)))
            if self._is_missing(missing).any():
                raise DataError(f"cached features '{self.path}' vanished while they were computed")
            if not self._is_missing(np.arange(len(self))).any():
                self._finish()

    # ---- what is there

    @cached_property
    def _there(self) -> npt.NDArray[np.uint8] | None:
        """One for each row that is there, as all processes write it; None: all are."""
        if self._values.size == 0 or self.path.exists():
            return None
        try:
            return np.asarray(np.memmap(self._beside(".there"), np.uint8, mode="r"))
        except FileNotFoundError:  # completed meanwhile
            return None

    @cached_property
    def _values(self) -> FeatureRows:
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

    def _opened(self) -> FeatureRows | None:
        """The rows as a memory map, those that are missing zero; None if nothing usable is there."""
        with contextlib.suppress(FileNotFoundError):
            return self._mapped(self.path)
        with contextlib.suppress(OSError, DataError):
            rows = self._mapped(self._beside(".rows"))
            return rows if self._beside(".there").stat().st_size == len(rows) else None
        return self._mapped(self.path) if self.path.exists() else None  # another process completed it meanwhile

    def _mapped(self, path: Path) -> FeatureRows:
        try:
            rows: FeatureRows = np.asarray(np.load(path, mmap_mode="r"))
        except ValueError as error:
            raise DataError(f"cached features '{path}' are damaged ({error}); delete the file") from error
        if rows.dtype != np.float16:
            raise DataError(f"cached features '{path}' are {rows.dtype}, not float16; delete the file")
        return rows

    def _begun(self, shape: tuple[int, ...]) -> FeatureRows:
        """Files of a shape in which no row is there; they take no room yet."""
        rows, there = self._beside(".rows"), self._beside(".there")
        for path in (there, rows):  # damaged ones
            path.unlink(missing_ok=True)
        with rows.open("wb") as file:
            header = {"descr": "<f2", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 2 * int(np.prod(shape)))
        with there.open("wb") as file:  # last, as it says that the other is usable
            file.truncate(shape[0])
        return self._mapped(rows)

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

    def _finish(self) -> None:
        there = self._beside(".there")
        with self._lock():
            if there.exists() and np.fromfile(there, np.uint8).all():
                self._beside(".rows").replace(self.path)
                there.unlink()

    # ---- computing

    def _fill(self, groups: Sequence[_Rows]) -> None:
        begun, total = time.monotonic(), sum(len(group) for group in groups) * self.block
        for group in prepared(f"encoding {self.what}", groups, total, size=len(groups[0]) * self.block):
            # another process may have completed the file, or computed the group
            with self._lock(), contextlib.suppress(FileNotFoundError), self._beside(".there").open("r+b", 0) as there:
                self._compute(group, there.fileno())
        _log.info("%s: %d rows encoded in %.0f s", self.what, total, time.monotonic() - begun)

    def _compute(self, blocks: _Rows, there: int) -> None:
        rows = (blocks[:, None] * self.block + np.arange(self.block)).ravel()
        rows = rows[rows < len(self)]
        missing = rows[self._is_missing(rows)]
        rows = rows[np.isin(rows // self.block, missing // self.block)]
        if len(missing) == 0:
            return
        with self._beside(".rows").open("r+b", buffering=0) as file:
            size = self._values[0].nbytes
            start = os.fstat(file.fileno()).st_size - self._values.nbytes
            for row in missing.tolist() if hasattr(os, "posix_fallocate") else ():
                os.posix_fallocate(file.fileno(), start + row * size, size)  # a full disk is told before the work
            values = dict(zip(rows.tolist(), self._rounded(rows), strict=True))
            for row in missing.tolist():
                os.pwrite(file.fileno(), values[row].tobytes(), start + row * size)
            os.fsync(file.fileno())
        for row in missing.tolist():
            os.pwrite(there, b"\1", row)

    def _is_missing(self, rows: _Rows) -> npt.NDArray[np.bool_]:
        return np.zeros(len(rows), np.bool_) if self._there is None else self._there[rows] == 0

    def _rounded(self, rows: _Rows) -> FeatureRows:
        values: FeatureRows = self.compute(rows.tolist()).detach().cpu().half().numpy()
        good = np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if not good.all():
            row = int(rows[np.argmin(good)])
            raise DataError(f"{self.what}: row {row} is not finite in float16; check the backbone and that row")
        return values
