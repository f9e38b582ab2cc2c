"""Which masked sums a client has taken part in, so that the same ask is not answered again for others.

Two sums of one ask, of which the second leaves a client out, differ by that client's reply.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from polyfed.core.errors import PayloadError
from polyfed.core.files import private_files, write_atomically

FILE = "answered-sums.json"
"""Beside what a client keeps; without it, its site answers as if nothing had been sent."""


@dataclass(frozen=True)
class AnsweredSum:
    """A sum for which masked words were sent.

    Attributes:
        request: digest of what was asked.
        members: whose keys were exchanged, sorted.
        survivors: for whom shares were told, sorted; empty: none were told.
    """

    request: str
    members: list[str]
    survivors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class AnsweredSums:
    """The sums of one client, by round and ask.

    Attributes:
        folder: of what the client keeps.
    """

    folder: Path

    def require_same(self, ask: tuple[int, int], **asked: str | Collection[str]) -> None:
        """Check that an ask that was answered before is of the same request and clients; ``asked`` by attribute.

        Raises:
            PayloadError: it is not.
        """
        before = self._load().get(_key(ask))
        if before is None:
            return
        for attribute, value in asked.items():
            known = getattr(before, attribute)
            now = value if isinstance(value, str) else sorted(value)
            if known and now != known:
                before_now = "another request" if isinstance(now, str) else f"{', '.join(known)}, not {', '.join(now)}"
                raise PayloadError(
                    f"ask {ask[1]} of round {ask[0]} was answered here for {before_now}; two sums would tell what one "
                    f"client sent. Who operates the site can allow it: remove '{FILE}' of the client"
                )

    def record(self, ask: tuple[int, int], answered: AnsweredSum) -> None:
        """Write a sum down; it is on the disk when this returns."""
        known = self._load()
        before = known.get(_key(ask))
        kept = before.survivors if before is not None and not answered.survivors else answered.survivors
        entry = AnsweredSum(answered.request, answered.members, kept)
        if entry != before:
            content = {key: asdict(one) for key, one in known.items()} | {_key(ask): asdict(entry)}
            with private_files():
                write_atomically(self.folder / FILE, json.dumps(content).encode())

    def _load(self) -> Mapping[str, AnsweredSum]:
        path = self.folder / FILE
        if not path.is_file():
            return {}
        try:
            return {key: AnsweredSum(**entry) for key, entry in json.loads(path.read_bytes()).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise PayloadError(f"'{FILE}' is damaged, so nobody knows which sums this client has answered") from error


def _key(ask: tuple[int, int]) -> str:
    return f"{ask[0]}.{ask[1]}"
