"""A terminal in the hands of the command line: warnings as lines, and what being told to end means."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from types import FrameType

import typer


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Being told to end is an interruption like Ctrl-C: the terminal, workers and folders are left in order."""
    raise KeyboardInterrupt


class _Lines(logging.Handler):
    """Warnings of the library as plain lines on stderr, above the bars where there are any."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        typer.echo(f"{record.levelname.lower()}: {record.getMessage()}", err=True)

    def filter(self, record: logging.LogRecord) -> bool:
        """The runner's warnings are shown as events of the run already."""
        return record.name != "polyfed.session"


@contextlib.contextmanager
def in_charge() -> Iterator[None]:
    """Warnings of the library are shown, and being told to end is an interruption, as long as a command runs."""
    shown, logger = _Lines(logging.WARNING), logging.getLogger("polyfed")
    logger.addHandler(shown)
    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        yield
    finally:
        logger.removeHandler(shown)
        signal.signal(signal.SIGTERM, before)
