"""Keys of one round (agreement of two clients, masks, sealed messages) and shares of 32-byte secrets."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import combinations, islice
from math import prod
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
PRIME = 2**521 - 1
"""Order of the field of the shares: a Mersenne prime above all secrets."""
SHARE_BYTES = 66
SecretCheck = Callable[[bytes], bool]
"""True for the right secret."""
_PIECE = 1 << 15  # words
_ZEROS = memoryview(bytes(8 * _PIECE))
_NONCE = bytes(12)  # a key seals one message in its life
_TRIES = 2000  # sets of shares that are tried if some are false


def new_key() -> bytes:
    """A private key or a seed from the system's randomness, never from a run's."""
    return secrets.token_bytes(KEY_BYTES)


def public_of(private: bytes) -> bytes:
    """The public half of an X25519 key (RFC 7748)."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes, context: bytes) -> bytes:
    """The shared secret of two parties for one purpose: X25519, then HKDF-SHA256 (RFC 5869) with the context.

    Raises:
        PayloadError: the public key is not one of X25519.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise PayloadError(f"not a public key of X25519: {error}") from error
    return derived(shared, context)


def derived(secret: bytes, context: bytes) -> bytes:
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=context).derive(secret)


def add_mask(words: Residues, seed: bytes, *, negative: bool = False) -> None:
    """Add or subtract uniform words in place: the key stream of AES-256 in counter mode; a seed makes one mask.

    The words are taken in pieces, so that the stream is in the cache when it is added.
    """
    cipher, size = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor(), words.itemsize
    for start in range(0, len(words), _PIECE):
        piece: Any = words[start : start + _PIECE]
        stream = np.frombuffer(cipher.update(_ZEROS[: len(piece) * size]), piece.dtype.newbyteorder("<"))
        (np.subtract if negative else np.add)(piece, stream, out=piece)


def sealed(key: bytes, text: bytes, about: bytes) -> bytes:
    """The text encrypted, and authenticated together with its context ``about`` (ChaCha20-Poly1305, RFC 8439)."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, text, about)


def unsealed(key: bytes, text: bytes, about: bytes) -> bytes:
    """The text that was sealed.

    Raises:
        PayloadError: the key or the context is another one, or the text was changed on its way.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, text, about)
    except InvalidTag as error:
        raise PayloadError("shares that were not made for this client and request, or changed on the way") from error


# ---- shares of a secret, of which t restore it and t - 1 reveal nothing (Shamir, CACM 1979)


def split(secret: bytes, shares: int, threshold: int) -> list[bytes]:
    """Values at 1 ... n of a random polynomial of degree t - 1 whose value at 0 is the secret."""
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [polynomial(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in range(1, shares + 1)]


def polynomial(coefficients: Sequence[int], x: int) -> int:
    """sum_k c_k x^k modulo the prime, by Horner's rule."""
    return reduce(lambda value, coefficient: (value * x + coefficient) % PRIME, reversed(coefficients), 0)


def secret_of(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret that these shares, by position from 1, belong to; None if there is none."""
    value = interpolated({x: int.from_bytes(share, "big") for x, share in shares.items()})
    return value.to_bytes(KEY_BYTES, "big") if value < 1 << 8 * KEY_BYTES else None


def interpolated(points: Mapping[int, int]) -> int:
    """Value at 0 of the polynomial through the points, modulo the prime (Lagrange)."""

    def basis(x: int) -> int:
        others = [other for other in points if other != x]
        return prod(others) * pow(prod(other - x for other in others), -1, PRIME)

    return sum(y * basis(x) for x, y in points.items()) % PRIME


def recovered(shares: Mapping[int, bytes], threshold: int, is_right: SecretCheck) -> bytes:
    """The secret, from shares of which some may be false.

    Args:
        shares: Share of each position, from 1.
        threshold: Number t of shares that restore the secret.
        is_right: True for the secret that was promised.

    Raises:
        PayloadError: there are fewer than t shares, or no t of them restore the secret.
    """
    if len(shares) < threshold:
        raise PayloadError(f"{len(shares)} shares, the threshold is {threshold}")
    for positions in islice(combinations(sorted(shares), threshold), _TRIES):
        secret = secret_of({x: shares[x] for x in positions})
        if secret is not None and is_right(secret):
            return secret
    raise PayloadError(f"no {threshold} of {len(shares)} shares give the secret that was promised; some are false")
