"""Messages between the short-lived processes of a node and its worker: JSON and raw bytes over a local socket."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np

from polyfed.engines.flower_records import MessageFields
from polyfed.wire.frames import Frame

_BOUNDARY = 64
_STARTING = 120.0  # seconds that a worker may take to come up, or to come back


def call_worker(
    address: str, kind: str, fields: MessageFields, frames: Sequence[Frame], config: Mapping[str, Any]
) -> tuple[MessageFields, Sequence[Frame]]:
    """Have the worker serve a message; see ``flower_records.Serve``.

    Raises:
        ConnectionError: the worker is not there, or died over it; the message can be sent again.
    """
    try:
        with _connected(address) as connection:
            send(connection, {"kind": kind, "fields": fields, "config": dict(config)}, frames)
            content, reply = receive(connection)
    except (EOFError, OSError) as error:
        raise ConnectionError(f"the site's worker died in this step ({type(error).__name__})") from error
    return dict(content["fields"]), reply


def send(connection: Connection[Any, Any], content: Mapping[str, Any], frames: Sequence[Frame]) -> None:
    """Send JSON, then the bytes of the frames as they are."""
    layout = [(frame.header, [buffer.nbytes for buffer in frame.buffers]) for frame in frames]
    connection.send_bytes(json.dumps({**content, "layout": layout}).encode())
    for frame in frames:
        for buffer in frame.buffers:
            _write(connection, buffer)


def receive(connection: Connection[Any, Any]) -> tuple[dict[str, Any], list[Frame]]:
    """What ``send`` sent."""
    content = json.loads(connection.recv_bytes())
    layout = content.pop("layout")
    frames = [Frame(str(header), [_read(connection, int(size)) for size in sizes]) for header, sizes in layout]
    return content, frames


def _write(connection: Connection[Any, Any], buffer: memoryview) -> None:
    left = buffer
    while left:
        left = left[os.write(connection.fileno(), left) :]


def _read(connection: Connection[Any, Any], size: int) -> memoryview:
    """Bytes on a boundary of 64, where tensors need no copy of them."""
    memory = np.empty(size + _BOUNDARY, dtype=np.uint8)
    start = -memory.ctypes.data % _BOUNDARY
    received = left = memory[start : start + size].data
    while left:
        count = os.readv(connection.fileno(), [left])
        if not count:
            raise EOFError
        left = left[count:]
    return received


def _connected(address: str) -> Connection[Any, Any]:
    end = time.monotonic() + _STARTING
    while True:
        try:
            return Client(address, family="AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
