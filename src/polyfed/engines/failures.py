"""What a server is told of what goes wrong at a site."""

from __future__ import annotations

import logging
import secrets

from polyfed.core.errors import RefusedError

_log = logging.getLogger(__name__)


def told(error: Exception, *, in_full: bool) -> str:
    """The error in a line: its text, or its class and a number under which the log here has the text.

    A refusal says nothing but what was asked and what the site demands, so its text is told.
    """
    text = str(error)
    if not in_full and not isinstance(error, RefusedError):
        number = secrets.token_hex(4)
        _log.error("error %s", number, exc_info=error)
        text = f"error {number} in the site's log"
    return f"{type(error).__name__}: {text}"
