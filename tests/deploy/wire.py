"""Requests as an attacker would send them: byte by byte, past any library that would tidy them up."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from polyfed.deploy.check_network import PROTOBUF


@dataclass(frozen=True)
class Raw:
    status: int
    body: bytes
    head: bytes = b""


@contextlib.contextmanager
def connected(port: int, authority: Path, *protocols: str) -> Iterator[ssl.SSLSocket]:
    context = ssl.create_default_context(cafile=str(authority))
    if protocols:
        context.set_alpn_protocols(list(protocols))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        yield secure


def http1(
    port: int, authority: Path, target: str, *, method: str = "POST", headers: str = "", host: str = "localhost"
) -> Raw:
    """One HTTP/1.1 request with this very target."""
    head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {PROTOBUF}\r\n{headers}"
    return raw(port, authority, f"{head}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())


def raw(port: int, authority: Path, request: bytes) -> Raw:
    """The answer to these bytes; status 0 if the connection is just closed."""
    with connected(port, authority) as secure:
        with contextlib.suppress(ConnectionError, ssl.SSLError):  # it may have been answered before it was sent
            secure.sendall(request)
        received = _all(secure)
    head, _, body = received.partition(b"\r\n\r\n")
    return Raw(int(head.split(b" ", 2)[1]) if head else 0, body, head)


def lines(headers: Mapping[str, str]) -> str:
    """Headers as they stand in a request."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def posted(port: int, authority: Path, path: str, body: bytes, headers: Mapping[str, str]) -> Raw:
    """A POST, and its answer, even where that comes before the body was sent."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {PROTOBUF}\r\n{lines(headers)}"
    return raw(port, authority, f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)


def http2(port: int, authority: Path, path: str, headers: Mapping[str, str] | None = None) -> bytes:
    """The body of the answer to a POST over HTTP/2 with this very ``:path``."""
    fields = {":method": "POST", ":scheme": "https", ":authority": "localhost", ":path": path, "content-type": PROTOBUF}
    fields |= headers or {}
    block = b"".join(b"\0" + _sized(name) + _sized(value) for name, value in fields.items())
    end_of_headers_and_stream = 0x5
    request = _frame(4, 0, 0) + _frame(1, end_of_headers_and_stream, 1, block)
    with connected(port, authority, "h2") as secure:
        assert secure.selected_alpn_protocol() == "h2"
        secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + request)
        return _data(secure)


def _sized(text: str) -> bytes:
    """A literal of HPACK: its length in seven bits, and in more bytes if it is longer."""
    size, head = len(text), b""
    if size < 127:
        return bytes([size]) + text.encode()
    size -= 127
    while size >= 128:
        head += bytes([size % 128 + 128])
        size //= 128
    return b"\x7f" + head + bytes([size]) + text.encode()


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


def _data(secure: ssl.SSLSocket) -> bytes:
    seen = b""
    reader = secure.makefile("rb")
    while len(head := reader.read(9)) == 9:
        content = reader.read(int.from_bytes(head[:3], "big"))
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        assert kind not in (3, 7), f"stream or connection was reset: {content!r}"
        if stream == 1 and kind == 0:
            seen += content
        if stream == 1 and flags & 1:
            break
    return seen


def _all(secure: ssl.SSLSocket) -> bytes:
    received = b""
    try:
        while part := secure.recv(65536):
            received += part
    except (ConnectionResetError, ssl.SSLError):
        pass
    return received
