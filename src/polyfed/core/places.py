"""Paths in settings: each becomes whole where it is read, so that whoever uses it later may work in any folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

_starts: ContextVar[tuple[Path | None, Path | None]] = ContextVar("starts", default=(None, None))


@contextlib.contextmanager
def paths_from(folder: Path | None, file: Path | None = None) -> Iterator[None]:
    """Within the block relative paths of settings start from a folder, by default the working folder.

    Args:
        folder: from which they start; None: the working folder.
        file: folder of the file that is read, for what lies beside it; None: as all others.
    """
    token = _starts.set((folder, file))
    try:
        yield
    finally:
        _starts.reset(token)


def start_of_paths() -> Path:
    """The folder from which relative paths of settings start here."""
    return _starts.get()[0] or Path.cwd()


def whole(path: Path | str, start: Path | None = None) -> Path:
    """The path from ``start``, by default ``start_of_paths``, with ``~`` for the user's own."""
    given = os.path.expanduser(path)  # noqa: PTH111 - which leaves the name of a user who is not there as it is
    return Path(os.path.normpath((start or start_of_paths()) / given))


def named_in(variable: str) -> Path | None:
    """The folder that a variable of the environment names, if it is set."""
    return whole(os.environ[variable]) if os.environ.get(variable) else None


Place = Annotated[Path, AfterValidator(whole)]
"""A path that starts from the working folder, or from that of its run."""

PlaceBeside = Annotated[Path, AfterValidator(lambda path: whole(path, _starts.get()[1]))]
"""A path that starts from the folder of the file that names it."""
