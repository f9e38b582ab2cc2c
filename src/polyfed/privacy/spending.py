"""The ledger of what a client gives away: on its site's disk before a step begins, whatever kills the process."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from polyfed.core.errors import DataError
from polyfed.core.files import sync_folder, write_atomically, write_fully
from polyfed.core.untrusted import file_json
from polyfed.privacy.accounting import PrivacyCost
from polyfed.privacy.secret import keyed_digest


@dataclass(frozen=True)
class LedgerLine:
    """A line of a ledger: a charge before a step begins, or which reply is about to leave.

    Attributes:
        request: keyed digest of the request.
        reply: keyed digest of request, protection and reply before noise, from which the noise is drawn; empty while
            nobody knows it.
        cost: what is charged; None: the reply is paid for by an earlier line.
    """

    request: str
    reply: str = ""
    cost: PrivacyCost | None = None


@dataclass(frozen=True)
class SpendingLedger:
    """What one client has given away, over all runs that share the file.

    Each line has a code of it and of the line before, by the site's secret, so that no line can be changed, moved or
    taken out. The file ``CLIENT.head`` has their number and the code of the last one, with a code of both, so that the
    ledger alone cannot be cut, nor replaced by an old copy. A note beside the secret says that there is a head. Old
    copies of all three are believed: only a copy elsewhere tells them apart.

    Attributes:
        path: of the ledger.
        key: of the codes.
        note: file that is there once the ledger has a head; None: none is kept.
    """

    path: Path
    key: bytes
    note: Path | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[SpendingLedger]:
        """Keep other processes from reading and spending in the block.

        Raises:
            OSError: the head cannot be brought up to the ledger, of which a kill or a full disk has kept it.
            DataError: as ``entries``.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._note([code for _, code in self._read()])
            yield self

    def entries(self) -> list[LedgerLine]:
        """All lines that are on disk; a last one that was cut off counts for nothing, as nothing has left for it.

        Raises:
            DataError: a line is damaged or not in its place, or lines are missing.
        """
        return [entry for entry, _ in self._read()]

    def costs(self) -> list[PrivacyCost]:
        """What was charged, in order; errors as ``entries``."""
        return [entry.cost for entry in self.entries() if entry.cost is not None]

    def append(self, entry: LedgerLine) -> None:
        """Write a line; all of it is on the disk when this returns.

        Raises:
            OSError: there is no room for it; the ledger is then as before.
            DataError: as ``entries``.
        """
        known = self._read()
        code, line = self._line(entry, known[-1][1] if known else "")
        start = sum(len(written) + 1 for written in self._lines())
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, start)  # of what a kill has cut off
            write_fully(descriptor, line + b"\n", start)
        finally:
            os.close(descriptor)
        sync_folder(self.path.parent)
        # a kill before this leaves a ledger of one line more than the head knows of, which is no rollback
        self._note([*(before for _, before in known), code])

    def _note(self, codes: Sequence[str]) -> None:
        if not codes:
            return
        content = self._head_of(len(codes), codes[-1])
        if not (self._head.exists() and self._head.read_bytes() == content):
            write_atomically(self._head, content)
        if self.note is not None and not self.note.exists():  # only now: it says that there is a head
            write_atomically(self.note, b"")

    def _head_of(self, count: int, last: str) -> bytes:
        content = f"{count} {last}"
        return (
            f"{content} {keyed_digest(self.key, b'head', self.path.stem.encode(), content.encode()).hex()}\n".encode()
        )

    @property
    def _head(self) -> Path:
        return self.path.with_suffix(".head")

    def _lines(self) -> list[bytes]:
        content = self.path.read_bytes() if self.path.exists() else b""
        return content[: content.rfind(b"\n") + 1].splitlines()

    def _line(self, entry: LedgerLine, before: str) -> tuple[str, bytes]:
        """The code of an entry after the line with the code ``before``, and its own line."""
        content = asdict(entry)
        code = keyed_digest(self.key, self.path.stem.encode(), before.encode(), json.dumps(content).encode()).hex()
        return code, json.dumps({**content, "code": code}).encode()

    def _read(self) -> list[tuple[LedgerLine, str]]:
        """Entries with the codes of their lines."""
        known: list[tuple[LedgerLine, str]] = []
        for number, line in enumerate(self._lines(), 1):
            try:
                values = file_json(line)
                cost = values["cost"]
                entry = LedgerLine(values["request"], values["reply"], None if cost is None else PrivacyCost(**cost))
                code, expected = self._line(entry, known[-1][1] if known else "")
                if not hmac.compare_digest(line, expected):
                    raise ValueError("its code is not that of this line in this place with the site's secret")
            except (ValueError, KeyError, TypeError) as error:
                raise self._damaged(f"line {number} of '{self.path}' is damaged ({error})") from error
            known.append((entry, code))
        self._require_complete([code for _, code in known])
        return known

    def _require_complete(self, codes: Sequence[str]) -> None:
        if not self._head.exists():
            if self.note is not None and self.note.exists():
                raise self._damaged(f"'{self._head}' is gone, of which '{self.note}' knows")
            return
        content = self._head.read_bytes()
        parts = re.fullmatch(rb"([1-9][0-9]{0,17}) ([0-9a-f]{64}) [0-9a-f]{64}\n", content)
        if parts is None or not hmac.compare_digest(content, self._head_of(int(parts[1]), parts[2].decode())):
            raise self._damaged(f"'{self._head}' is damaged, or of another version")
        count = int(parts[1])
        if codes[count - 1 : count] != [parts[2].decode()]:
            raise self._damaged(f"'{self.path}' has {len(codes)} lines and lacks the last that '{self._head.name}' has")

    def _damaged(self, what: str) -> DataError:
        both = f"'{self._head.name}'{'' if self.note is None else f' and {self.note}'}"
        return DataError(
            f"{what}, so nobody knows what the client has given away; restore the newest copy of the ledger: without "
            f"it the client must not go on. To accept a copy that lacks the last lines, delete {both}: "
            "what those lines say is then given away and not counted"
        )
