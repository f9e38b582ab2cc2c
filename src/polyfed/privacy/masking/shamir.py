"""Shares of a secret of 32 bytes, of which t give it back and t - 1 say nothing (Shamir, CACM 1979)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, islice

from polyfed.core.errors import PayloadError

PRIME = 2**521 - 1
"""Order of the field: a Mersenne prime above all secrets."""
SHARE_BYTES = 66
_SECRET_BYTES = 32
SecretCheck = Callable[[bytes], bool]
"""Whether a secret is the right one."""
_TRIES = 2000  # sets of shares that are tried if some are false


def split(secret: bytes, shares: int, threshold: int) -> list[bytes]:
    """Values at 1 ... n of a random polynomial of degree t - 1 whose value at 0 is the secret."""
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [polynomial(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in range(1, shares + 1)]


def polynomial(coefficients: Sequence[int], x: int) -> int:
    """sum_k c_k x^k modulo the prime, by Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value


def secret_of(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret of which these are shares, by their places from 1; None if they are of none."""
    value = interpolated({x: int.from_bytes(share, "big") for x, share in shares.items()})
    return value.to_bytes(_SECRET_BYTES, "big") if value < 1 << 8 * _SECRET_BYTES else None


def interpolated(points: Mapping[int, int]) -> int:
    """Value at 0 of the polynomial through the points, modulo the prime (Lagrange)."""
    value = 0
    for x, y in points.items():
        above, below = 1, 1
        for other in points:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        value = (value + y * above * pow(below, -1, PRIME)) % PRIME
    return value


def recovered(shares: Mapping[int, bytes], threshold: int, is_right: SecretCheck) -> bytes:
    """The secret, of shares of which some may be false.

    Args:
        shares: by place, from 1.
        threshold: t.
        is_right: whether a secret is the one that was promised.

    Raises:
        PayloadError: fewer than t shares, or no t of them give it.
    """
    if len(shares) < threshold:
        raise PayloadError(f"{len(shares)} shares, the threshold is {threshold}")
    for places in islice(combinations(sorted(shares), threshold), _TRIES):
        secret = secret_of({x: shares[x] for x in places})
        if secret is not None and is_right(secret):
            return secret
    raise PayloadError(f"no {threshold} of {len(shares)} shares give the secret that was promised; some are false")
