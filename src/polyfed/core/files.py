"""Files that are either complete or absent, however the process ends; and paths in settings.

Each path is made absolute where it is read, so that later code may work in any folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Container, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from pathlib import Path

from polyfed.core.errors import RunError

_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP)  # answers of file systems that sync files only


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Within the block only this user can read files that this process, and those that it starts, write.

    Every program of polyfed runs within it: caches hold decoded images, run folders predictions and models.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def cut_last_line(path: Path) -> None:
    """Take away what follows the last complete line of a file, as a process that was killed may have left it."""
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def require_plain(folder: Path, *, inside: Container[str] | None = None) -> None:
    """Check a folder from elsewhere: it holds files and folders, and no link in it leads out of it.

    Files below it then belong to this folder, and reading does not wait for another process.

    Args:
        folder: Folder to check.
        inside: Names of its folders that are checked too; None: all. Others belong to other programs.

    Raises:
        RunError: it holds a pipe, a device or a socket, or a link that leads elsewhere.
    """
    top = folder.resolve()
    for place, folders, names in os.walk(top):
        for path in (Path(place, name) for name in (*folders, *names)):
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode) and not Path(os.path.realpath(path)).is_relative_to(top):
                raise RunError(f"'{path}' is a link out of the folder; put what it leads to in its place, or remove it")
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                raise RunError(f"'{path}' is neither a file nor a folder; remove it")
        if inside is not None and place == str(top):
            folders[:] = [name for name in folders if name in inside]


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write bytes, or blocks of them, next to ``path``, flush them to disk and move them into place, name included.

    Raises:
        OSError: the disk is full or the folder not writable; the attempt leaves no file.
    """
    with _moved_to(path) as temporary, temporary.open("wb") as stream:
        stream.writelines([data] if isinstance(data, bytes) else data)
        stream.flush()
        os.fsync(stream.fileno())


def link_atomically(source: Path, path: Path) -> None:
    """Give a file that is never changed in place a second name, or a copy where the file system has no hard links.

    Raises:
        OSError: see ``write_atomically``.
    """
    try:
        with _moved_to(path) as temporary:
            temporary.hardlink_to(source)
    except OSError:
        with source.open("rb") as stream:
            write_atomically(path, iter(partial(stream.read, 1 << 22), b""))


@contextlib.contextmanager
def _moved_to(path: Path) -> Iterator[Path]:
    """A free name in the folder of ``path``; the file that has it after the block is moved there."""
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    # in the same folder, since a move is one step only within a file system
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # of a process that was killed; to write into a link would change another file
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # a move onto another name of the same file leaves both
    # a new folder is an entry of its parent, which must last as well
    for folder in (path.parent, *(folder.parent for folder in made)):
        sync_folder(folder)


def write_fully(descriptor: int, data: bytes, start: int) -> None:
    """Write all of ``data`` at an offset of a file; on return it is on the disk, and was read back.

    Raises:
        OSError: there is not enough room; the file then ends at ``start``.
    """
    try:
        done = 0
        while done < len(data):  # a disk that is nearly full takes a part without an error
            written = os.pwrite(descriptor, data[done:], start + done)
            if written < 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += written
        os.fsync(descriptor)
        if os.pread(descriptor, len(data) + 1, start) != data:
            raise OSError(errno.EIO, "the file differs from what was written into it")
    except BaseException:
        os.ftruncate(descriptor, start)
        raise


def sync_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder that may be written into and not read
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            raise
    finally:
        os.close(descriptor)


_starts: ContextVar[tuple[Path | None, Path | None]] = ContextVar("starts", default=(None, None))


@contextlib.contextmanager
def paths_from(folder: Path | None, file: Path | None = None) -> Iterator[None]:
    """Within the block relative paths of settings start from a folder, by default the working folder.

    Args:
        folder: Start of relative paths; None: the working folder.
        file: Folder of the settings' file, for what lies next to it; None: like all others.
    """
    token = _starts.set((folder, file))
    try:
        yield
    finally:
        _starts.reset(token)


def start_of_paths() -> Path:
    """Folder from which relative paths of settings start here."""
    return _starts.get()[0] or Path.cwd()


def folder_of_file() -> Path | None:
    """Folder of the file of settings in use; None: they come from no file."""
    return _starts.get()[1]


def whole(path: Path | str, start: Path | None = None) -> Path:
    """The path from ``start``, by default ``start_of_paths``, with ``~`` for the user's own."""
    given = os.path.expanduser(path)  # noqa: PTH111 - which leaves the name of an unknown user as it is
    return Path(os.path.normpath((start or start_of_paths()) / given))


def named_in(variable: str) -> Path | None:
    """The folder that an environment variable names, if it is set."""
    return whole(os.environ[variable]) if os.environ.get(variable) else None


def user_cache() -> Path:
    """Folder of caches unless a setting names another: POLYFED_CACHE, else ``~/.cache/polyfed``."""
    return named_in("POLYFED_CACHE") or Path.home() / ".cache" / "polyfed"
