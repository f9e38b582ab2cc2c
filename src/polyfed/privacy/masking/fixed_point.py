"""Real numbers as whole numbers modulo 2^k, so that sums of them are exact in any order, masked or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import PayloadError

Residues = NDArray[np.uint32] | NDArray[np.uint64]
"""Whole numbers modulo 2^32 or 2^64; numpy adds them so."""

_WHOLE = 8  # binary digits after the point of a mean of counters


@dataclass(frozen=True)
class FixedPoint:
    """Weighted values as words of k bits.

    A value x of a client whose weight is the share a of all weights together becomes round(a x 2^(k-2) / range). As
    shares sum to at most 1, a sum stays below 2^(k-2), and rounding, half a unit a client, in the bit above it.

    Attributes:
        range: largest magnitude of a value.
        bits: k.
    """

    range: float = 64.0
    bits: Literal[32, 64] = 32

    @property
    def dtype(self) -> Any:
        return np.uint32 if self.bits == 32 else np.uint64

    @property
    def resolution(self) -> float:
        """Size of a unit in the sum; each client rounds to half of it."""
        return self.range / 2.0 ** (self.bits - 2)

    def encoded(self, values: NDArray[Any], share: float | NDArray[np.float64]) -> Residues:
        """A client's values in their words, flat.

        Args:
            values: floating, or whole numbers, which have a range and resolution of their own.
            share: the client's weight over that of all who were asked, from 0 to 1; or one a value.

        Raises:
            PayloadError: a value is not finite, or beyond the range; it tells nothing of them, as the server reads it.
        """
        flat, limit = values.reshape(-1).astype(np.float64), self._limit(values.dtype)
        if not float(np.abs(flat).max(initial=0.0)) <= limit:
            raise PayloadError(
                f"a reply that does not fit {self.bits} bits of range {self.range:g}; raise aggregation.secure.range"
            )
        flat *= share * 2.0 ** (self.bits - 2) / limit
        return np.rint(flat, out=flat).astype(np.int64).astype(self.dtype)

    def mean(self, words: Residues, share: float, like: np.dtype[Any]) -> NDArray[np.float64]:
        """The weighted mean of which ``words`` are the sum.

        Args:
            words: sum of the words of all clients that count.
            share: sum of their shares, above 0.
            like: type of the values that the words are of.
        """
        signed = words.view(np.int32 if self.bits == 32 else np.int64).astype(np.float64)
        return signed * (self._limit(like) / 2.0 ** (self.bits - 2) / share)

    def _limit(self, dtype: np.dtype[Any]) -> float:
        is_floating = np.issubdtype(dtype, np.floating)
        return self.range if is_floating else 2.0 ** (self.bits - 2 - _WHOLE)


def total(words: Sequence[Residues]) -> Residues:
    """Sum modulo 2^k of vectors of one length."""
    result = words[0].copy()
    for other in words[1:]:
        result += other
    return result
