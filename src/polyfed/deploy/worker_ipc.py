"""Errands between the short-lived processes of a node and its worker: JSON and raw bytes over a local socket."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np

from polyfed.engines.flower_client import Facts
from polyfed.wire.frames import Frame

_BOUNDARY = 64
_STARTING = 120.0  # seconds that a worker may take to come up, or to come back


def call_worker(
    address: str, kind: str, facts: Facts, parts: Sequence[Frame], config: Mapping[str, Any]
) -> tuple[Facts, Sequence[Frame]]:
    """Have the worker serve a message; see ``flower_client.Serve``.

    Raises:
        ConnectionError: the worker is not there, or died over it; the message can be sent again.
    """
    try:
        with _connected(address) as connection:
            send(connection, {"kind": kind, "facts": facts, "config": dict(config)}, parts)
            found, made = receive(connection)
    except (EOFError, OSError) as error:
        raise ConnectionError(f"the site's worker died in this step ({type(error).__name__})") from error
    return dict(found["facts"]), made


def send(connection: Connection[Any, Any], content: Mapping[str, Any], parts: Sequence[Frame]) -> None:
    """Send JSON, then the bytes of the parts as they are."""
    layout = [(part.header, [buffer.nbytes for buffer in part.buffers]) for part in parts]
    connection.send_bytes(json.dumps({**content, "layout": layout}).encode())
    for part in parts:
        for buffer in part.buffers:
            _write(connection, buffer)


def receive(connection: Connection[Any, Any]) -> tuple[dict[str, Any], list[Frame]]:
    """What ``send`` sent."""
    content = json.loads(connection.recv_bytes())
    layout = content.pop("layout")
    parts = [Frame(str(header), [_read(connection, int(size)) for size in sizes]) for header, sizes in layout]
    return content, parts


def _write(connection: Connection[Any, Any], buffer: memoryview) -> None:
    rest = buffer
    while rest:
        rest = rest[os.write(connection.fileno(), rest) :]


def _read(connection: Connection[Any, Any], size: int) -> memoryview:
    """Bytes on a boundary of 64, where tensors need no copy of them."""
    raw = np.empty(size + _BOUNDARY, dtype=np.uint8)
    start = -raw.ctypes.data % _BOUNDARY
    whole = rest = raw[start : start + size].data
    while rest:
        count = os.readv(connection.fileno(), [rest])
        if not count:
            raise EOFError
        rest = rest[count:]
    return whole


def _connected(address: str) -> Connection[Any, Any]:
    end = time.monotonic() + _STARTING
    while True:
        try:
            return Client(address, family="AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
