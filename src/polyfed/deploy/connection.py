"""A site's connection: the process that fetches the server's messages and hands them to the site's worker.

It speaks Flower's fleet API, as SuperNode does, but fetches only messages. It never requests the app of a run at the
server, so even an attacker who controls the server can run only the polyfed that the site has installed.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable import inflatable_object as objects
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, push_objects
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from polyfed.core.untrusted import log_plainly
from polyfed.deploy.engines.flower_pull import Refusal, taken
from polyfed.deploy.engines.flower_records import Serve, answered_message, to_records
from polyfed.deploy.folders import SiteFolder, private_key
from polyfed.deploy.worker import call_worker

_log = logging.getLogger(__name__)
_Call = Callable[[str], Any]
_ACTIONS = {"query.describe": "describe", "train.step": "step"}
_SHORTEST, _LONGEST = 0.05, 1.0  # seconds between requests for messages, each of which takes a signature


def serve_connection(arguments: Sequence[str]) -> str:
    """``python -m polyfed.deploy.connection SERVER FOLDER SOCKET BYTES``, until SIGTERM or the server ends the session.

    SERVER is the gate's host:port, FOLDER the site's, SOCKET the worker's, and BYTES the largest message.
    """
    log_plainly(logging.INFO, "%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("flwr").propagate = False  # it has a handler of its own
    logging.getLogger("httpx").setLevel(logging.WARNING)  # or it logs every request
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the session is closed at the server
    server, site, worker, most = arguments[0], SiteFolder(Path(arguments[1])), arguments[2], int(arguments[3])
    key, config, pause = private_key(site.key), {"config": str(site.config)}, _SHORTEST
    opened = http_request_response(server, False, str(site.authority), (key, key.public_key()))
    with contextlib.suppress(KeyboardInterrupt), opened as (_, receive, send, _, _, pull, push, confirm):
        _log.info("connected to %s", server)
        while True:
            try:
                if (received := receive()) is None:
                    time.sleep(pause)
                    pause = min(2 * pause, _LONGEST)
                    continue
                pause, began, (message, tree) = _SHORTEST, time.monotonic(), received
                run, serve = message.metadata.run_id, partial(call_worker, worker)
                reply = reply_to(message, tree, most, partial(pull, run), partial(confirm, run), serve, config)
                with objects.no_object_id_recompute():
                    reply.metadata.__dict__["_message_id"] = reply.object_id  # Flower gives ids no public setter
                    missing, place = send(reply, objects.get_object_tree(reply), time.monotonic() - began)
                    parts = objects.get_all_nested_objects(reply)
                    push_objects(parts, partial(push, run, place), object_ids_to_push=missing)
            except (RunNotRunningException, ObjectPushError) as error:
                _log.warning("a message was lost, with its run or on its way: %s: %s", type(error).__name__, error)
    return f"disconnected from {server}"


def reply_to(
    message: Message, tree: Any, most: int, pull: _Call, confirm: _Call, serve: Serve, config: Mapping[str, Any]
) -> Message:
    """The site's reply to a message that is at the server.

    Args:
        message: Message without its content.
        tree: Names of the objects of its content.
        most: Largest size in bytes.
        pull: Fetches an object.
        confirm: Releases a message at the server.
        serve: The site's worker.
        config: Settings of the site, for the worker.
    """
    name, action = message.metadata.message_id, _ACTIONS.get(message.metadata.message_type)
    if action is None:
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
        return Message(answered_message(action, asked.content, config, serve), reply_to=message)
    except ConnectionError as error:
        return _failed(message, str(error))


def _failed(message: Message, reason: str) -> Message:
    """Flower's own error, after which a server of polyfed sends its message again."""
    _log.error("%s", reason)
    return Message(Error(ErrorCode.UNKNOWN, reason), reply_to=message)


if __name__ == "__main__":
    sys.exit(serve_connection(sys.argv[1:]))
