"""A site's worker: the process in which its data and models stay, and in which its clients' steps are performed.

It listens on a socket that only the site's user can open, and serves one message after the other.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from polyfed.core.files import private_files
from polyfed.core.untrusted import log_plainly
from polyfed.deploy.worker_ipc import receive, send
from polyfed.engines.flower_records import Serve

_log = logging.getLogger(__name__)


def serve_errands(address: Path, serve: Serve, go_on: Callable[[], bool] = lambda: True) -> None:
    """Serve messages, while ``go_on``, that arrive at a socket.

    Args:
        address: path of the socket, in a folder that only this user can enter; an old one is replaced.
        serve: see ``flower_records.Serve``.
        go_on: asked before each message.
    """
    address.unlink(missing_ok=True)
    with Listener(str(address), family="AF_UNIX") as listener:
        while go_on():
            try:
                with listener.accept() as connection:
                    _serve_one(connection, serve)
            except Exception as error:  # whatever one message was, the next one is served
                _log.error("a message was lost with the process that brought it: %s: %s", type(error).__name__, error)


def _serve_one(connection: Connection[Any, Any], serve: Serve) -> None:
    # a function, so that nothing of a message is held while the next is waited for
    content, frames = receive(connection)
    fields, reply = serve(content["kind"], content["fields"], frames, content["config"])
    send(connection, {"fields": fields}, reply)


def serve_worker(arguments: Sequence[str]) -> None:
    """``python -m polyfed.deploy.worker SOCKET``."""
    from polyfed.deploy.host import open_host
    from polyfed.engines.flower_node import Node

    log_plainly(logging.INFO, "%(asctime)s %(levelname)s %(message)s")
    with private_files():
        serve_errands(Path(arguments[0]), Node(open_host))


if __name__ == "__main__":
    serve_worker(sys.argv[1:])
