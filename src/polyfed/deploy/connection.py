"""A site's connection: the process that fetches the server's messages and hands them to the site's worker.

It speaks Flower's fleet API, as SuperNode does, but fetches messages alone. It never asks for the app that a run has at
the server, so whoever controls the server has nothing run here but the polyfed that the site has installed.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, push_objects
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from polyfed.core.untrusted import log_plainly
from polyfed.deploy.engines.flower_pull import Refusal, taken
from polyfed.deploy.engines.flower_records import Serve, answered_message, to_records
from polyfed.deploy.files import SiteFolder
from polyfed.deploy.keys import private_key
from polyfed.deploy.worker import call_worker

_log = logging.getLogger(__name__)
_KINDS = {"query.describe": "describe", "train.step": "step"}
_SHORTEST, _LONGEST = 0.05, 1.0  # seconds between questions for messages, of which each takes a signature


def reply_to(
    message: Message,
    tree: Any,
    most: int,
    pull: Callable[[str], bytes],
    confirm: Callable[[str], object],
    serve: Serve,
    config: dict[str, Any],
) -> Message:
    """The site's reply to a message that is at the server.

    Args:
        message: without its content.
        tree: names of the objects that its content consists of.
        most: bytes that it may have.
        pull: fetches an object.
        confirm: tells the server that it need not keep a message.
        serve: the site's worker.
        config: what the worker is told of the site.
    """
    name, kind = message.metadata.message_id, _KINDS.get(message.metadata.message_type)
    if kind is None:
        confirm(name)
        reason = f"'{message.metadata.message_type}' is for an app of the server, and this site runs none"
        return _failed(message, reason)
    asked = taken(name, tree, most, pull, confirm)
    if isinstance(asked, Refusal) and asked.final:
        _log.error("a message is refused: %s", asked.reason)
        return Message(to_records({"error": asked.reason}, []), reply_to=message)
    if asked.has_error():
        return _failed(message, str(asked.error.reason))
    try:
        return Message(answered_message(kind, asked.content, config, serve), reply_to=message)
    except ConnectionError as error:
        return _failed(message, str(error))


def _failed(message: Message, reason: str) -> Message:
    """Flower's own error, after which a server of polyfed sends its message again."""
    _log.error("%s", reason)
    return Message(Error(ErrorCode.UNKNOWN, reason), reply_to=message)


def connect(server: str, site: SiteFolder, worker: str, most: int) -> None:
    """Pass messages on until the server ends the session; see ``serve_connection``."""
    key, config = private_key(site.key), {"config": str(site.config)}
    keys, serve = (key, key.public_key()), partial(call_worker, worker)
    with http_request_response(server, False, str(site.authority), keys) as session:
        _, receive, send, _, _, pull, push, confirm = session
        _log.info("connected to %s", server)
        pause = _SHORTEST
        while True:
            try:
                if (received := receive()) is None:
                    time.sleep(pause)
                    pause = min(2 * pause, _LONGEST)
                    continue
                pause, began, (message, tree) = _SHORTEST, time.monotonic(), received
                run = message.metadata.run_id
                reply = reply_to(message, tree, most, partial(pull, run), partial(confirm, run), serve, config)
                with no_object_id_recompute():
                    reply.metadata.__dict__["_message_id"] = reply.object_id  # Flower gives ids no public setter
                    missing, push_session = send(reply, get_object_tree(reply), time.monotonic() - began)
                    objects = get_all_nested_objects(reply)
                    push_objects(objects, partial(push, run, push_session), object_ids_to_push=missing)
            except (RunNotRunningException, ObjectPushError) as error:
                _log.warning("a message was lost, with its run or on its way: %s: %s", type(error).__name__, error)


def serve_connection(arguments: Sequence[str]) -> int:
    """``python -m polyfed.deploy.connection SERVER FOLDER SOCKET BYTES``.

    SERVER is the gate's host:port, FOLDER the site's, SOCKET the worker's, and BYTES the largest message.
    """
    log_plainly(logging.INFO, "%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server is told on the way out
    server, folder, worker, most = arguments
    try:
        connect(server, SiteFolder(Path(folder)), worker, int(most))
    except KeyboardInterrupt:  # which Flower raises, too, when the server does not know this session any more
        _log.info("disconnected from %s", server)
    return 1


if __name__ == "__main__":
    sys.exit(serve_connection(sys.argv[1:]))
