"""Keys of one round: agreement between two clients, masks, and shares that only their receiver can read."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, islice
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from polyfed.core.errors import PayloadError
from polyfed.privacy.secure_sum import Residues

KEY_BYTES = 32
_PIECE = 1 << 15  # words
_ZEROS = memoryview(bytes(8 * _PIECE))
_NONCE = bytes(12)  # a key seals one message in its life


def new_key() -> bytes:
    """A private key, or a seed, of the system's randomness: never of a run's."""
    return secrets.token_bytes(KEY_BYTES)


def public_of(private: bytes) -> bytes:
    """The public half of an X25519 key (RFC 7748)."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes, context: bytes) -> bytes:
    """What two parties alone know, for one purpose: X25519, then HKDF-SHA256 (RFC 5869) with the context.

    Raises:
        PayloadError: the public key is none.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise PayloadError(f"not a public key of X25519: {error}") from error
    return derived(shared, context)


def derived(secret: bytes, context: bytes) -> bytes:
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=context).derive(secret)


def add_mask(words: Residues, seed: bytes, *, negative: bool = False) -> None:
    """Add uniform words in place, or subtract: the key stream of AES-256 in counter mode; a seed is for one mask.

    Piece by piece, so that the stream is in the cache when it is added.
    """
    cipher, size = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor(), words.itemsize
    for start in range(0, len(words), _PIECE):
        piece: Any = words[start : start + _PIECE]
        stream = np.frombuffer(cipher.update(_ZEROS[: len(piece) * size]), piece.dtype.newbyteorder("<"))
        if negative:
            piece -= stream
        else:
            piece += stream


def sealed(key: bytes, text: bytes, about: bytes) -> bytes:
    """Encrypted and authenticated, with what it is about (ChaCha20-Poly1305, RFC 8439)."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, text, about)


def unsealed(key: bytes, text: bytes, about: bytes) -> bytes:
    """What was sealed.

    Raises:
        PayloadError: with another key, about something else, or changed on its way.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, text, about)
    except InvalidTag as error:
        raise PayloadError("shares that were not made for this client and request, or changed on the way") from error


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
