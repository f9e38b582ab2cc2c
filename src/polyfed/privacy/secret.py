"""Draws that are unpredictable without a secret; the opposite of ``core.randomness``."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.core.files import sync_folder, write_fully

SHORTEST = 32
"""Fewest bytes of a secret."""
_BLOCK = 1 << 20  # draws from one call of the hash


def keyed_digest(secret: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA-256 of the parts, each with its length, so that no two lists of parts read alike; 32 bytes."""
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "big") + part)
    return mac.digest()


def uniform_draws(key: bytes, count: int) -> Float64[Tensor, " count"]:
    """Uniform draws within (0, 1), of 52 bits each, from SHAKE-256 of the key.

    Torch's generator on the CPU takes 32 bits of its seed, which can be tried out.
    """
    blocks = [np.zeros(0)]
    for start in range(0, count, _BLOCK):
        stream = hashlib.shake_256(key + start.to_bytes(8, "big")).digest(8 * min(_BLOCK, count - start))
        blocks.append((np.frombuffer(stream, dtype="<u8") >> np.uint64(12)).astype(np.float64))
    # half a step from either end: 0 and 1 have no normal quantile
    return torch.from_numpy((np.concatenate(blocks) + 0.5) / 2.0**52)


def normal_draws(key: bytes, count: int) -> Float64[Tensor, " count"]:
    """Standard normal draws by inversion of ``uniform_draws``."""
    draws: Float64[Tensor, " count"] = torch.special.ndtri(uniform_draws(key, count))
    return draws


def read_secret(path: Path) -> bytes:
    """The secret in a file.

    Raises:
        ConfigError: it cannot be read, is too short, or others can read it.
    """
    try:
        secret, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        hint = f"make one with: head -c 32 /dev/urandom > {path}; chmod 600 {path}"
        raise ConfigError(f"the secret '{path}' cannot be read ({error.strerror}); {hint}") from error
    if len(secret) < SHORTEST:
        raise ConfigError(f"the secret '{path}' has {len(secret)} bytes; give it at least {SHORTEST} random ones")
    if mode & 0o077:
        raise ConfigError(f"others can read the secret '{path}'; chmod 600 {path}")
    return secret


def kept_secret(path: Path) -> bytes:
    """The secret in a file, created from the system's randomness if the file is missing.

    Processes that call this at the same time get the same secret: a file gets its name once it is complete.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        own = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            write_fully(descriptor, os.urandom(SHORTEST), 0)
            with contextlib.suppress(FileExistsError):
                os.link(own, path)
        finally:
            os.close(descriptor)
            own.unlink()
        sync_folder(path.parent)
    return read_secret(path)
