"""A terminal in the hands of the command line: warnings as lines, and what being told to end means."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import get_type_hints

import click
import typer
from typer.core import TyperArgument
from typer.models import ArgumentInfo

from polyfed.core.untrusted import plain


class _Lines(logging.Handler):
    """Warnings of the library as plain lines on stderr, above the bars where there are any."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        typer.echo(plain(f"{record.levelname.lower()}: {record.getMessage()}"), err=True)

    def filter(self, record: logging.LogRecord) -> bool:
        """The runner's warnings are shown as events of the run already."""
        return record.name != "polyfed.runs.session"


def fail(message: str, code: int) -> int:
    """Print why a command ends, on one line; returns its exit code."""
    typer.echo(plain(" ".join(message.split())), err=True)
    return code


@contextlib.contextmanager
def interruptible(hint: str) -> Iterator[None]:
    """An interruption ends a command with exit code 130 and a hint of what there is now."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(fail(f"interrupted; {hint}", 130)) from None


def with_argument_help(command: click.Command) -> click.Command:
    """The command, and all below it, with the help of their arguments: click 8.5 takes away what typer gave them."""
    for below in getattr(command, "commands", {}).values():
        with_argument_help(below)
    hints = get_type_hints(command.callback, include_extras=True) if command.callback else {}
    for parameter in command.params:
        for info in getattr(hints.get(parameter.name or ""), "__metadata__", ()):
            if isinstance(info, ArgumentInfo) and isinstance(parameter, TyperArgument):
                parameter.help = info.help
    return command


@contextlib.contextmanager
def in_charge() -> Iterator[None]:
    """Warnings of the library are shown, and being told to end is an interruption, as long as a command runs."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt  # as of Ctrl-C: the terminal, workers and folders are left in order

    lines, logger = _Lines(logging.WARNING), logging.getLogger("polyfed")
    logger.addHandler(lines)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        logger.removeHandler(lines)
        signal.signal(signal.SIGTERM, before)


def forget_working_folder() -> None:
    """Look for modules where the program ``polyfed`` does, if it was started as ``python -m``.

    That puts the working folder before all others, and a configuration that somebody handed over could name a module
    that lies there. What PYTHONPATH names stays.
    """
    if not sys.flags.safe_path and sys.path and Path(sys.path[0]).resolve() == Path.cwd():
        del sys.path[0]
