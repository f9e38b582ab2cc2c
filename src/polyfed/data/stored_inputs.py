"""Inputs that take long to compute: kept in the cache, or computed for every batch where that has no room."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.data.cache import CacheFullError
from polyfed.data.source import Column
from polyfed.data.stored_rows import StoredRows

_log = logging.getLogger(__name__)


class Computation(Protocol):
    """What computes rows of a column, which is read when it is needed."""

    @property
    def column(self) -> Column:
        """Of raw values."""
        ...

    @property
    def values(self) -> pa.ChunkedArray:
        """The column's flat values."""
        ...

    def __call__(self, rows: Sequence[int]) -> Tensor:
        """What is made of ``rows``."""
        ...


class StoredInputs:
    """Opened rows: row numbers in, what was computed of them out, float32.

    Where the disk of the cache is full they are computed anew whenever they are asked for, rounded to float16 as those
    in the cache are. Unless they are to be there ``ahead``, rows are computed when they are first asked for.
    """

    def __init__(self, stored: StoredRows, compute: Computation, ahead: bool = True) -> None:
        self._stored, self._compute, self._ahead, self._is_live = stored, compute, ahead, False

    def __len__(self) -> int:
        return len(self._compute.values) if self._is_live else len(self._stored)

    def __call__(self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None) -> Float[Tensor, "b ..."]:
        """The rows; the same with and without a generator."""
        self._require(rows)
        if not self._is_live:
            return torch.from_numpy(self._stored(rows.numpy())).float()
        distinct, places = torch.unique(rows, return_inverse=True)
        return self._compute(distinct.tolist()).half().float()[places]

    def prepare(self, rows: Int64[Tensor, " n"]) -> None:
        """Compute and keep ``rows``, so that none of them is waited for later."""
        if self._ahead:
            self._require(rows)

    def _require(self, rows: Int64[Tensor, " n"]) -> None:
        if self._is_live:
            return
        try:
            self._stored.require(rows.numpy())
        except CacheFullError as error:
            _log.warning("%s: its rows are computed anew for every batch: %s", self._compute.column.where, error)
            self._is_live = True
