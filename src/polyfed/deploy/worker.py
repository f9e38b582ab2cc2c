"""A site's worker: the process that holds its data and models and performs its clients' steps.

It listens on a socket that only the site's user can open, and serves one message after the other: JSON, and raw bytes.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polyfed.core.files import private_files
from polyfed.core.untrusted import log_plainly
from polyfed.wire.limits import Frame

if TYPE_CHECKING:  # the module imports Flower, which a worker does not need
    from polyfed.deploy.engines.flower_records import MessageFields, Serve

_log = logging.getLogger(__name__)
_BOUNDARY = 64
START_SECONDS = 120.0  # seconds that a worker may take to come up, or to come back


def call_worker(
    address: str, action: str, fields: MessageFields, frames: Sequence[Frame], config: Mapping[str, Any]
) -> tuple[MessageFields, Sequence[Frame]]:
    """The worker's reply to a message; see ``flower_records.Serve``.

    Raises:
        ConnectionError: the worker is missing, or died; the message can be sent again.
    """
    try:
        with _connected(address) as connection:
            send(connection, {"action": action, "fields": fields, "config": dict(config)}, frames)
            content, reply = receive(connection)
    except (EOFError, OSError) as error:
        raise ConnectionError(f"the site's worker died in this step ({type(error).__name__})") from error
    return dict(content["fields"]), reply


def _connected(address: str) -> Connection[Any, Any]:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            return Client(address, family="AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def serve_errands(address: Path, serve: Serve, go_on: Callable[[], bool] = lambda: True) -> None:
    """Serve messages, while ``go_on``, that arrive at a socket.

    Args:
        address: Path of the socket, in a folder that only this user can enter; an old one is replaced.
        serve: See ``flower_records.Serve``.
        go_on: Called before each message; False ends the service.
    """
    address.unlink(missing_ok=True)  # left by a worker that was killed
    with Listener(str(address), family="AF_UNIX") as listener:
        while go_on():
            try:
                with listener.accept() as connection:
                    _serve_one(connection, serve)
            except Exception as error:  # the next message is served in any case
                _log.error("a message was lost with the process that brought it: %s: %s", type(error).__name__, error)


def _serve_one(connection: Connection[Any, Any], serve: Serve) -> None:
    # a function, so that a message is released before the wait for the next one
    content, frames = receive(connection)
    fields, reply = serve(content["action"], content["fields"], frames, content["config"])
    send(connection, {"fields": fields}, reply)


def send(connection: Connection[Any, Any], content: Mapping[str, Any], frames: Sequence[Frame]) -> None:
    """Send JSON, then the bytes of the frames as they are."""
    layout = [(frame.header, [buffer.nbytes for buffer in frame.buffers]) for frame in frames]
    connection.send_bytes(json.dumps({**content, "layout": layout}).encode())
    for left in (buffer for frame in frames for buffer in frame.buffers):
        while left:  # a socket may accept less than the rest
            left = left[os.write(connection.fileno(), left) :]


def receive(connection: Connection[Any, Any]) -> tuple[dict[str, Any], list[Frame]]:
    """Content and frames from ``send``."""
    content = json.loads(connection.recv_bytes())
    layout = content.pop("layout")
    return content, [Frame(str(header), [_read(connection, int(size)) for size in sizes]) for header, sizes in layout]


def _read(connection: Connection[Any, Any], size: int) -> memoryview:
    """Received bytes on a boundary of 64, so that tensors need no copy."""
    memory = np.empty(size + _BOUNDARY, dtype=np.uint8)
    start = -memory.ctypes.data % _BOUNDARY
    received = left = memory[start : start + size].data
    while left:
        if not (count := os.readv(connection.fileno(), [left])):
            raise EOFError
        left = left[count:]
    return received


def serve_worker(arguments: Sequence[str]) -> None:
    """``python -m polyfed.deploy.worker SOCKET``."""
    from polyfed.deploy.engines.flower_node import Node
    from polyfed.deploy.host import open_host

    log_plainly(logging.INFO, "%(asctime)s %(levelname)s %(message)s")
    with private_files():
        serve_errands(Path(arguments[0]), Node(open_host))


if __name__ == "__main__":
    serve_worker(sys.argv[1:])
