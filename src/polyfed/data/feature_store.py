"""A table of float16 rows, computed once, chunk by chunk, and taken up again where it was interrupted."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import FileLock
from torch import Tensor

from polyfed.core.activity import prepared
from polyfed.core.errors import DataError

_log = logging.getLogger(__name__)

FeatureRows = npt.NDArray[np.float16]

REPORT_SECONDS = 10.0


def stored(
    path: Path,
    shape: Callable[[], tuple[int, ...]],
    compute: Callable[[int, int], Tensor],
    *,
    chunk: int = 256,
) -> FeatureRows:
    """The rows at ``path``, computed if they are not there: float16 [n, ...], a read-only memory map.

    ``path`` exists only when it is complete. Until then the rows stand in ``path.part``, and ``path.done``
    counts those that are there: an interrupted computation goes on from that chunk. One process computes,
    others wait. Nothing is called if the rows are there.

    Args:
        path: file to keep the rows in; what they depend on must be part of its name.
        shape: gives the shape of all rows, (n, ...).
        compute: rows ``start`` to ``stop`` -> [stop - start, ...].
        chunk: rows to compute at a time; so many are lost at most when it is interrupted.

    Raises:
        DataError: a row is not finite in float16, or the folder cannot be written.
    """
    try:
        if not path.exists():
            whole = shape()
            if whole[0] == 0:
                return np.zeros(whole, np.float16)
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                if not path.exists():
                    _fill(path, whole, compute, chunk)
        return _opened(path)
    except OSError as error:
        raise _unusable(path, error) from error


def _opened(path: Path) -> FeatureRows:
    try:
        rows: FeatureRows = np.load(path, mmap_mode="r")
    except ValueError as error:
        raise DataError(f"cached features '{path}' are damaged ({error}); delete the file") from error
    if rows.dtype != np.float16:
        raise DataError(f"cached features '{path}' are {rows.dtype}, not float16; delete the file")
    return rows


def _fill(path: Path, shape: tuple[int, ...], compute: Callable[[int, int], Tensor], chunk: int) -> None:
    part, done = path.with_suffix(".part"), path.with_suffix(".done")
    start = _resumed(part, done, shape)
    rows = np.lib.format.open_memmap(part, mode="r+" if start else "w+", dtype=np.float16, shape=shape)
    progress = _Progress(path.stem, start, shape[0])
    firsts = range(start, shape[0], chunk)
    for first in prepared(f"caching features ({path.stem})", firsts, shape[0], size=chunk, before=start):
        last = min(first + chunk, shape[0])
        rows[first:last] = _finite(compute(first, last), first, path.stem)
        rows.flush()
        _replace(done, json.dumps({"rows": last, "shape": shape}))
        progress.report(last)
    del rows
    part.replace(path)
    done.unlink(missing_ok=True)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _unusable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cache folder '{path.parent}' cannot be used ({error}); choose another with data.cache_dir or POLYFED_CACHE"
    )


def _resumed(part: Path, done: Path, shape: tuple[int, ...]) -> int:
    """Rows that an interrupted computation left in ``part``."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        state = json.loads(done.read_text())
        found = np.load(part, mmap_mode="r")
        if found.shape == shape == tuple(state["shape"]) and found.dtype == np.float16:
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
        found = json.loads(path.read_text())
        if isinstance(found, list):
            return found
    value = compute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, json.dumps(value))
    except OSError as error:
        raise _unusable(path, error) from error
    return value


class _Progress:
    def __init__(self, name: str, start: int, total: int) -> None:
        self.name, self.start, self.total = name, start, total
        self.began = self.told = time.monotonic()

    def report(self, done: int) -> None:
        now = time.monotonic()
        if done == self.total or now - self.told >= REPORT_SECONDS:
            rate = (done - self.start) / max(now - self.began, 1e-9)
            _log.info("%s: %d of %d rows, %.1f rows/s", self.name, done, self.total, rate)
            self.told = now
