"""Errors that users can cause and correct: each names the fault, the value and the remedy."""

from __future__ import annotations

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

_ROOTS = "|".join(re.escape(str(root)) for root in (Path(__file__).parents[1], sysconfig.get_path("stdlib")))
_LIBRARY = re.compile(rf"^(?:{_ROOTS}|<frozen )|[/\\](?:site|dist)-packages[/\\]")


class PolyfedError(Exception):
    """Base of all errors with a cause and a remedy in their one-line message; the CLI exits with code 2 on them."""

    def _render_traceback_(self) -> list[str]:
        """Text that IPython shows in place of a traceback: the message has the cause."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(PolyfedError):
    """A setting is unknown, out of range, or does not fit the others."""


class DataError(PolyfedError):
    """A data folder, file, column or sample is missing or damaged, or sets overlap."""


class RunError(PolyfedError):
    """A run folder cannot be created, resumed or read."""


class ExchangeError(PolyfedError):
    """Too few clients answered a step of a round with a usable reply."""


class StepError(PolyfedError):
    """A client's step raised an error in a process of the run itself, or made a reply that cannot be used."""


class PayloadError(PolyfedError):
    """A message does not have the declared names, shapes, types or finite values."""


class RefusedError(PayloadError):
    """A site refuses a request because of the request alone; the text holds no data, and may be sent."""


class BudgetError(PolyfedError):
    """A client has used up its privacy budget."""


def author_line(error: BaseException) -> str:
    """``file:line`` of the innermost code outside libraries on the way to an error; empty if there is none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _LIBRARY.search(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def unknown(what: str, name: str, valid: Iterable[str]) -> str:
    """Message about an unknown name, with the valid ones."""
    return f"unknown {what} '{name}'; {nearest(name, valid)}"


def nearest(word: str, valid: Iterable[str]) -> str:
    """Hint for an unknown word: the closest valid one, if any is close, and all valid ones."""
    names = sorted(valid)
    close = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}valid: {', '.join(names) or 'none'}"
