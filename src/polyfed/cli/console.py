"""Warnings, errors and ends of the command line."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, get_type_hints

import typer
from typer.core import TyperArgument
from typer.models import ArgumentInfo

from polyfed.core.errors import ConfigError
from polyfed.core.untrusted import plain

if TYPE_CHECKING:
    from rich.console import Console


class _Lines(logging.Handler):
    """Warnings of the library as plain lines on stderr, above the bars where there are any."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        typer.echo(plain(f"{record.levelname.lower()}: {record.getMessage()}"), err=True)

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop the runner's warnings, which are shown as events of the run."""
        return record.name != "polyfed.runs.session"


def fail(message: str, code: int) -> int:
    """Print the reason of a command's end, on one line; returns its exit code."""
    typer.echo(plain(" ".join(message.split())), err=True)
    return code


@contextlib.contextmanager
def interruptible(hint: str) -> Iterator[None]:
    """End the command with exit code 130 and a hint if it is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(fail(f"interrupted; {hint}", 130)) from None


@contextlib.contextmanager
def preparation_shown(console: Console) -> Iterator[None]:
    """Show the reading and computing of data; an interruption reports that no file was written."""
    from polyfed.core.activity import heard_by
    from polyfed.reporting.progress import progress_for
    from polyfed.runs.events import Callbacks

    display = Callbacks([progress_for(console)])
    with interruptible("nothing was written"), contextlib.closing(display), heard_by(display):
        yield


_OF_SITES = ("pairs", "pictures", "texts", "sounds", "masks", "table")  # options of init that users tend to repeat


def prepared(command: Any) -> Any:
    """Give a command, and all below it, help for its arguments, which click 8.5 removes, and parsing by ``_parse``.

    The command is of click, or of the click within newer typers.
    """
    for below in getattr(command, "commands", {}).values():
        prepared(below)
    hints = get_type_hints(command.callback, include_extras=True) if command.callback else {}
    for parameter in command.params:
        for info in getattr(hints.get(parameter.name or ""), "__metadata__", ()):
            if isinstance(info, ArgumentInfo) and isinstance(parameter, TyperArgument):
                parameter.help = info.help
    command.parse_args = functools.partial(_parse, command, command.parse_args)
    return command


def _parse(command: Any, parse: Callable[[Any, list[str]], list[str]], context: Any, words: list[str]) -> list[str]:
    """Parse the words after a command; an option that takes one value and is given twice is refused."""
    _, _, given = command.make_parser(context).parse_args(args=list(words))
    for parameter, times in Counter(given).items():
        if times > 1 and not parameter.multiple:
            sites = ", or --site NAME=PATH for each institution" if parameter.name in _OF_SITES else ""
            raise ConfigError(f"{parameter.opts[0]} is given {times} times; give it once{sites}")
    return parse(context, words)


@contextlib.contextmanager
def warnings_and_signals() -> Iterator[None]:
    """While a command runs, print the library's warnings, and treat SIGTERM as an interruption."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt  # as Ctrl-C does: the terminal, workers and folders are left in order

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

    That puts the working folder first, where a module may lie that a configuration from elsewhere names. What
    PYTHONPATH names stays.
    """
    if not sys.flags.safe_path and sys.path and Path(sys.path[0]).resolve() == Path.cwd():
        del sys.path[0]
