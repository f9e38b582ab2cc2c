"""Findings: what a check saw, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from polyfed.core.errors import PolyfedError

Level = Literal["ok", "warning", "error"]
_RENEW_DAYS = 30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: ``error`` keeps the site from taking part, or leaves a door open.
        what: the thing, in a word or two.
        detail: what was seen.
        remedy: what to do; empty where nothing is to be done.
    """

    level: Level
    what: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:7} {self.what}: {self.detail}" + (f"\n        -> {self.remedy}" if self.remedy else "")


def failed(findings: Iterable[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


def guarded(what: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check; an exception in it is a finding too, for a check must see all that there is to see."""
    try:
        yield from check()
    except PolyfedError as error:  # says itself what to do
        yield Finding("error", what, str(error))
    except Exception as error:
        yield Finding("error", what, f"{type(error).__name__}: {error}", "compare site.yaml with the data and models")


def expiry(what: str, left: float, name: str, remedy: str) -> Finding:
    """What a certificate's remaining days mean."""
    if left < 0:
        return Finding("error", what, f"{name} expired {-left:.0f} days ago", remedy)
    if left < _RENEW_DAYS:
        return Finding("warning", what, f"{name} expires in {left:.0f} days", remedy)
    return Finding("ok", what, f"{name} is valid for {left:.0f} days")
