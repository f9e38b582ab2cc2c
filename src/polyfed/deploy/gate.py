"""The gate: Caddy in front of SuperLink, so that sites reach its fleet API and nothing else, and only signed.

SuperLink serves three APIs on one port. The control API registers nodes and starts runs; so SuperLink listens on
loopback only, and only ``/v1/fleet/`` passes the gate. SuperLink reads a complete request before it checks the
signature; so the gate asks here first whether an admitted key has signed it. A signature covers only the time of its
request, so each is valid for one request.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socketserver
import sys
import tempfile
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from http.server import BaseHTTPRequestHandler
from importlib import resources
from pathlib import Path
from string import Template

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from polyfed.core.errors import RunError
from polyfed.deploy.flower_programs import AUTHENTICATION
from polyfed.deploy.folders import private_key, public_key

REFUSAL = "no admitted key signed this request"
"""Body of the refusal; a check recognises it, in contrast to one of SuperLink."""

KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER = "flwr-public-key", "flwr-timestamp", "flwr-signature"
"""Headers of the fleet API: the site's public key and the signature in base64, and the time that it signed."""

AHEAD, BEHIND = 5.0, 300.0
"""Seconds that a site's clock may be ahead of the server's, and behind it; SuperLink's own tolerance."""

CLOSED = "closed"
"""Body of the gate's own refusal; a check recognises it, in contrast to an answer of SuperLink."""

BODY_LIMIT = 16 * 2**20
"""Largest request that brings content, bytes: Flower sends tensors in chunks of 5 MiB and lists of their hashes."""

_SMALL_LIMIT = 2**20  # largest request of any other kind, bytes
_ACTIVATION = "/v1/fleet/activate-node"
_IDLE = 300.0  # seconds that the gate may leave a connection unused


def caddyfile(host: str, port: int, superlink_port: int) -> str:
    """The gate's configuration.

    Args:
        host: Name of the server for sites; a name of loopback binds the gate to loopback.
        port: Public port.
        superlink_port: Port of SuperLink on 127.0.0.1.
    """
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    template = resources.files("polyfed.deploy").joinpath("Caddyfile.template").read_text(encoding="utf-8")
    return Template(template).substitute(
        host=host,
        port=port,
        bind="127.0.0.1" if is_loopback else "0.0.0.0 [::]",
        superlink_port=superlink_port,
        limit=BODY_LIMIT,
        small_limit=_SMALL_LIMIT,
        closed=CLOSED,
        refusal=REFUSAL,
        variable=AUTHENTICATION,
    )


def require_authentication(path: Path) -> None:
    """Check that a gate's configuration requires signatures, unlike those of early versions of polyfed.

    Raises:
        RunError: it does not.
    """
    if f"{{${AUTHENTICATION}}}" not in path.read_text(encoding="utf-8"):
        what = f"'{path}' does not authenticate requests before they are read (forward_auth {{${AUTHENTICATION}}})"
        raise RunError(f"{what}; move the file away, and the server writes a new one at its next start")


# ---- signatures


class Signatures:
    """Recognises requests that an admitted key has just signed.

    Args:
        now: Clock.
    """

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._keys: dict[bytes, ec.EllipticCurvePublicKey] = {}
        self.seen: dict[tuple[bytes, int], datetime] = {}  # key and signature -> when it has run out
        self._lock = threading.Lock()

    def admit(self, keys: Iterable[str]) -> None:
        # one assignment: requests are judged by the old keys or by the new, never by a part
        self._keys = dict(_in_pem(line) for line in keys)

    def accepts(self, headers: Mapping[str, str]) -> bool:
        """True if the headers are signed by an admitted key, recently, and were not seen before."""
        now = self._now()
        try:
            pem = b64decode(headers[KEY_HEADER], validate=True)
            signature = b64decode(headers[SIGNATURE_HEADER], validate=True)
            age = (now - datetime.fromisoformat(headers[TIME_HEADER])).total_seconds()
            self._keys[pem].verify(signature, headers[TIME_HEADER].encode("ascii"), ec.ECDSA(hashes.SHA256()))
            # (r, -s) is another valid signature of the same text, computed from (r, s) without the key
            mark, _ = decode_dss_signature(signature)
        except (KeyError, ValueError, TypeError, OverflowError, InvalidSignature):
            return False
        if not -AHEAD < age < BEHIND + AHEAD:
            return False
        with self._lock:
            for old, end in list(self.seen.items()):  # oldest first
                if end > now:
                    break
                del self.seen[old]
            if (pem, mark) in self.seen:
                return False
            self.seen[pem, mark] = now + timedelta(seconds=BEHIND + 2 * AHEAD)
            return True


def signed(private: Path, now: datetime | None = None) -> dict[str, str]:
    """Headers of a request signed with a site's key."""
    key, time = private_key(private), (now or datetime.now(UTC)).isoformat()
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signature = key.sign(time.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    return {KEY_HEADER: b64encode(pem).decode(), TIME_HEADER: time, SIGNATURE_HEADER: b64encode(signature).decode()}


@lru_cache(maxsize=4096)
def _in_pem(line: str) -> tuple[bytes, ec.EllipticCurvePublicKey]:
    key = public_key(line.encode(), line)
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), key


@contextlib.contextmanager
def answering(accepts: Callable[[Mapping[str, str]], bool]) -> Iterator[str]:
    """Answer the gate within the block; yields the address in the form of the gate's configuration.

    The socket is in a folder that only this user can enter.
    """
    with tempfile.TemporaryDirectory(prefix="polyfed-") as folder:
        path = Path(folder) / "authentication"
        with _Server(str(path), accepts) as server:
            thread = threading.Thread(target=server.serve_forever, name="authentication", daemon=True)
            thread.start()
            try:
                yield f"unix/{path}"
            finally:
                server.shutdown()
                thread.join()


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, path: str, accepts: Callable[[Mapping[str, str]], bool]) -> None:
        self.accepts = accepts
        super().__init__(path, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors after the gate has hung up, as it does when its own client does."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE
    server: _Server

    def do_GET(self) -> None:
        given = {name: self.headers.get_all(name, []) for name in (KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER)}
        # if a header comes twice, SuperLink might read the other one
        checked = {name: values[0] for name, values in given.items() if len(values) == 1}
        is_accepted = self.server.accepts(checked)
        # a site's connection reports the reason after 412 at its activation, and ends silently after 401
        refused = 412 if self.headers.get("X-Forwarded-Uri") == _ACTIVATION else 401
        body = b"" if is_accepted else REFUSAL.encode()
        self.send_response_only(200 if is_accepted else refused)
        self.send_header("Content-Length", str(len(body)))
        for name, value in checked.items() if is_accepted else ():
            self.send_header(name, value)  # the gate forwards these in place of the received ones
        self.end_headers()
        if body:  # the gate may have left after the headers of an answer without content
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log no request, as requests hold signatures."""
