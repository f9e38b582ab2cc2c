"""Accounts of sources: counts of everything that was found, read, and left out, with the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LeftOut:
    """Some of what was found and is not used.

    Attributes:
        reason: in a phrase.
        count: how many.
        example: name of the first; empty where there is none to give.
    """

    reason: str
    count: int
    example: str = ""

    def __str__(self) -> str:
        example = f", such as '{self.example}'" if self.example else ""
        return f"{self.count:,} {self.reason}{example}"


@dataclass(frozen=True)
class Count:
    """Count of one unit of a source: ``found`` is ``read`` plus all that is left out.

    Attributes:
        unit: files, rows, columns, items of a split, tokens, ...
        found: counted before anything is decided.
        read: counted in what is used.
        left_out: the rest, by reason.
    """

    unit: str
    found: int
    read: int
    left_out: tuple[LeftOut, ...] = ()

    @classmethod
    def of(cls, unit: str, found: int, read: int, left_out: Iterable[LeftOut]) -> Count:
        """A count without the reasons that leave nothing out."""
        return cls(unit, found, read, tuple(part for part in left_out if part.count))

    @property
    def adds_up(self) -> bool:
        return self.found == self.read + sum(part.count for part in self.left_out)

    def lines(self) -> list[str]:
        """One line, and one more for each reason."""
        return [
            f"{self.unit}: {self.found:,} found, {self.read:,} read",
            *(f"  left out: {each}" for each in self.left_out),
        ]

    def plain(self) -> dict[str, Any]:
        """For a file: numbers and reasons, without names of files."""
        left_out = {part.reason: part.count for part in self.left_out}
        return {"unit": self.unit, "found": self.found, "read": self.read, "left_out": left_out}


Accounts = Mapping[str, tuple[Count, ...]]
"""Source -> its counts."""
