"""The ledger of what a client has given away: on its site's disk before a reply leaves, whatever kills the process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from polyfed.core.errors import DataError
from polyfed.core.files import sync_folder
from polyfed.core.untrusted import file_json
from polyfed.federation.accounting import PrivacyCost


@dataclass(frozen=True)
class Release:
    """A reply that has left its client, or may have.

    Attributes:
        request: keyed digest of the request.
        reply: keyed digest of request, protection and reply before noise, which the noise is drawn from.
        cost: what it gives away.
    """

    request: str
    reply: str
    cost: PrivacyCost


@dataclass(frozen=True)
class SpendingLedger:
    """The releases of one client, one line each, over all runs that share the file."""

    path: Path

    @contextlib.contextmanager
    def held(self) -> Iterator[SpendingLedger]:
        """Keep other processes from reading and spending in the block."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self

    def releases(self) -> list[Release]:
        """All that are on disk. A last line that was cut off counts for nothing: its reply was never sent.

        Raises:
            DataError: another line is damaged.
        """
        return [self._release(number, line) for number, line in enumerate(self._whole_lines(), 1)]

    def _whole_lines(self) -> list[bytes]:
        content = self.path.read_bytes() if self.path.exists() else b""
        return content[: content.rfind(b"\n") + 1].splitlines()

    def _release(self, number: int, line: bytes) -> Release:
        try:
            entry = file_json(line.decode())
            return Release(str(entry["request"]), str(entry["reply"]), PrivacyCost(**entry["cost"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"line {number} of '{self.path}' is damaged ({error}), so nobody knows what the client has given away; "
                "restore the file from a copy: without it the client must not go on"
            ) from error

    def append(self, release: Release) -> None:
        """Write a release down; it is on the disk when this returns."""
        line = (json.dumps(asdict(release)) + "\n").encode()
        whole = sum(len(known) + 1 for known in self._whole_lines())
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, whole)  # of what a kill has cut off
            os.lseek(descriptor, 0, os.SEEK_END)
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(self.path.parent)
