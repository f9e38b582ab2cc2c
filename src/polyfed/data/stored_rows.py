"""Inputs that take long to compute, kept in the cache: only rows that somebody asks for are computed, and each once."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock, Timeout
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.core.activity import prepared, preparing
from polyfed.core.errors import DataError
from polyfed.data.cache import CacheFullError, usable

_log = logging.getLogger(__name__)

_Rows = npt.NDArray[np.int64]
_Values = npt.NDArray[np.float16]


@dataclass
class StoredRows:
    """Opened rows, float32 [b, ...], of which a file holds float16 [n, ...].

    While rows are missing they stand in ``path.rows``, and ``path.there`` has one byte for each that is there, set when
    the row is on the disk; with the last of them the file takes its final name. One process writes at a time. Where the
    disk has no room, rows are computed whenever they are asked for, rounded as those in the file are.

    Attributes:
        path: file to keep the rows in; what they depend on must be part of its name.
        shape: gives the shape of all rows, (n, ...); called if no file tells it.
        compute: row numbers -> rows [k, ...], whose bits must not depend on which rows are asked for together.
        what: is computed, for displays and logs.
        ahead: whether ``prepare`` computes; else rows are computed when they are first asked for.
        group: rows after which what was computed is written, so many are lost at most by an interruption.
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

    def __call__(self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None) -> Float[Tensor, "b ..."]:
        """The rows, those that are missing computed now; the same with and without a generator.

        Raises:
            DataError: a row is not finite in float16, or the folder cannot be written.
        """
        self._require(rows.numpy())
        if self._has_room:
            return torch.from_numpy(self._values[rows.numpy()]).float()
        distinct, inverse_index = torch.unique(rows, return_inverse=True)
        return self.compute(distinct.tolist()).half().float()[inverse_index]

    def prepare(self, rows: Int64[Tensor, " n"]) -> None:
        """Compute and keep ``rows``, so that none of them is waited for later; errors as above."""
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
        """One for each row that is there, as all processes write it; None: all are."""
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
        """The rows as a memory map, those that are missing zero; None if nothing usable is there."""
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

    def _missing(self, rows: _Rows) -> _Rows:
        """Those of the rows that are not there, each once, ascending."""
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
        """Compute and write missing rows; whoever calls it holds the lock."""
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
            os.posix_fallocate(file, start + row * size, size)  # a full disk is told before the work
        values: _Values = self.compute(rows.tolist()).detach().cpu().half().numpy()
        finite = np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if not finite.all():
            row = int(rows[np.argmin(finite)])
            raise DataError(f"{self.what}: row {row} is not finite in float16; check the backbone and that row")
        for row, value in zip(rows.tolist(), values, strict=True):
            os.pwrite(file, value.tobytes(), start + row * size)
        os.fsync(file)
        for row in rows.tolist():  # only now: a killed process leaves no mark of a row that is not on the disk
            os.pwrite(marks, b"\1", row)
