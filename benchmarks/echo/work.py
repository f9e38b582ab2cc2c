"""Content, arithmetic and measurements of an echo; numpy only, as the bare rivals have nothing else."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
WIDTH = 256  # of a representation


@dataclass(frozen=True)
class Round:
    """One exchange with all clients.

    Attributes:
        size: bytes to each client, and from each.
        seconds: from the first message to the last reply summed.
        started: when, in seconds of the clock on the wall.
        crc: checksum of the sum of the replies.
    """

    size: int
    seconds: float
    started: float
    crc: int


def shape(size: int) -> tuple[int, int]:
    """Rows and columns of an array of about so many bytes."""
    return max(size // (4 * WIDTH), 1), WIDTH


def bank(size: int, number: int) -> Array:
    """Array that the server sends in a round: no two rounds alike, and no two chunks of it."""
    return np.random.default_rng([size, number]).standard_normal(shape(size), dtype=np.float32)


def addend(client: int) -> float:
    """Number that a client adds: replies of different clients have no chunk in common, so none is stored for two."""
    return 1.0 + client / 4


def measured(size: int, exchange: Callable[[], Iterable[Array]]) -> Round:
    """Times one exchange with all clients, whose replies are summed as they come."""
    total = np.ones(shape(size), dtype=np.float32)  # memory that has been touched
    started, begin = time.time(), time.perf_counter()
    for reply in exchange():
        total += reply
    return Round(size, time.perf_counter() - begin, started, zlib.crc32(total.data))


def write_rounds(path: Path, rounds: Sequence[Round]) -> None:
    """Write the rounds for the process that started this one."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps([asdict(item) for item in rounds]))
    part.replace(path)


def read_rounds(path: Path) -> list[Round]:
    """Rounds of ``write_rounds``."""
    return [Round(**item) for item in json.loads(path.read_text())]


def rounds_of_run(folder: Path) -> list[Round]:
    """The rounds of an echo through polyfed, from its run folder."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line["metrics"] for line in lines if line["kind"] == "train"]
    return [Round(int(m["size"]), m["seconds"], m["started"], int(m["crc"])) for m in trained]
