"""Single requests over TLS that trust the federation's authority alone."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPSConnection
from pathlib import Path

from polyfed.core.errors import RunError

PROTOBUF = "application/protobuf"
_LARGEST = 1 << 16


@dataclass(frozen=True)
class ProbeAnswer:
    """An answer over HTTP.

    Attributes:
        status: its code.
        body: its first 64 KiB.
        date: the server's clock, as in the header ``Date``; empty if it sent none.
    """

    status: int
    body: bytes
    date: str


def ask(
    host: str,
    port: int,
    path: str,
    authority: Path,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 10.0,
) -> ProbeAnswer:
    """Send one request, past any proxy, to a server whose certificate ``authority`` (a PEM file) has signed.

    Raises:
        RunError: the authority cannot be read, the host is not reached, or its certificate is not trusted.
    """
    try:
        trust = ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as error:
        raise RunError(f"'{authority}' is not a readable certificate: {error}") from error
    connection = HTTPSConnection(host, port, timeout=timeout, context=trust)
    try:
        kind = {"Content-Type": PROTOBUF} if body is not None else {}
        connection.request(method, path, body=body, headers={**kind, **(headers or {})})
        found = connection.getresponse()
        return ProbeAnswer(found.status, found.read(_LARGEST), found.getheader("Date") or "")
    except ssl.SSLCertVerificationError as error:
        raise RunError(f"{host}:{port} does not present a certificate that {authority.name} signed: {error}") from error
    except (OSError, HTTPException) as error:
        raise RunError(f"{host}:{port} is not reached: {error}") from error
    finally:
        connection.close()
