"""The ClientApp of a site: passes messages on to the site's worker, a process that stays.

Flower starts a process for every message. If that process did the work itself, it would import torch and build data
and models every time; instead it hands the bytes to the worker that ``polyfed deploy site`` keeps beside SuperNode. A
SuperNode that was started by hand has no worker, and its processes do the work.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.untrusted import log_plainly
from polyfed.deploy.engines.flower_records import MessageFields, client_app
from polyfed.wire.limits import Frame

WORKER = "POLYFED_WORKER"
"""Environment variable with the socket of the site's worker."""


def site_app() -> Any:
    """The ClientApp that a SuperNode runs; its configuration is the node's ``config``."""
    return client_app(_serve)


def _serve(
    kind: str, fields: MessageFields, frames: Sequence[Frame], config: Mapping[str, Any]
) -> tuple[MessageFields, Sequence[Frame]]:
    if address := os.environ.get(WORKER):
        from polyfed.deploy.worker import call_worker

        return call_worker(address, kind, fields, frames, config)
    from polyfed.core.files import private_files
    from polyfed.deploy.engines.flower_node import Node
    from polyfed.deploy.host import open_host

    log_plainly(logging.INFO, "%(levelname)s: %(message)s")
    with private_files():
        return Node(open_host)(kind, fields, frames, config)
