"""Look-ups and connections of Python processes, as ``recorder/sitecustomize.py`` writes them down."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

LOOPBACK = {"localhost", "127.0.0.1", "::1", "0.0.0.0", None, ""}
RECORDER = Path(__file__).parent / "recorder"


class Record(NamedTuple):
    event: str
    place: str
    program: str

    @property
    def host(self) -> str | None:
        """Name or address; None for a socket in the file system."""
        value = ast.literal_eval(self.place)
        value = value[0] if isinstance(value, tuple) else value
        value = value.decode(errors="replace") if isinstance(value, bytes) else value
        return None if value is None or value.startswith(("/", "\0")) else str(value)


def recording(folder: Path) -> dict[str, str]:
    """Environment of processes that are to be recorded into a new folder."""
    folder.mkdir()
    return {"POLYFED_RECORD": str(folder), "PYTHONPATH": str(RECORDER)}


def recorded(folder: Path) -> list[Record]:
    return [Record(*line.split("\t")) for path in folder.glob("*.txt") for line in path.read_text().splitlines()]


def outside(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.host not in LOOPBACK]
