"""Files that are either complete or not there, whatever kills the process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Within the block nobody but this user can read what this process, and those that it starts, write.

    Every program of polyfed runs within it: caches hold decoded pictures, run folders predictions and models.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk: without it, a file that is new in it can be gone after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path``, flush it to disk and move it into place.

    Raises:
        OSError: the disk is full or the folder not writable; nothing of the attempt is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
