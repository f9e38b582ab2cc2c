"""Fingerprints of node keys, by which people compare them."""

from __future__ import annotations

from base64 import b64decode, b64encode
from functools import lru_cache
from hashlib import sha256


def fingerprint(public: str) -> str:
    """Fingerprint of a public key, an OpenSSH line, as ``ssh-keygen -l`` shows it: to compare over the phone."""
    digest = sha256(b64decode(public.split()[1])).digest()
    return "SHA256:" + b64encode(digest).decode().rstrip("=")


@lru_cache(maxsize=1024)
def fingerprint_of_pem(public: bytes) -> str:
    """Fingerprint of a public key in PEM, as SuperLink has it; empty if it is none."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

    try:
        line = load_pem_public_key(public).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    except (ValueError, UnsupportedAlgorithm):
        return ""
    return fingerprint(line.decode())
