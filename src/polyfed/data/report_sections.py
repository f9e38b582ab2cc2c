"""Sections of radiology reports, told apart by their headings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Literal

_HEADING = re.compile(r"^[ \t]*([A-Za-z][A-Za-z /&(),-]{0,60}?)[ \t]*:", re.MULTILINE)
_FIRST_LINE = re.compile(r"\A\s*FINAL REPORT\b")
_LINKING = frozenset({"and", "for", "of", "the", ""})  # blank: what is left of the plural in "(S)"


def section_text(report: str, sections: Sequence[str], otherwise: Literal["whole", "none"] = "whole") -> str | None:
    """The text of some sections of a radiology report, in the report's order, with single spaces.

    A section begins with a heading and a colon at the start of a line, and ends at the next heading. In capitals a
    heading is any short phrase with a usual word (``FINDINGS AND IMPRESSION``); otherwise all its words must be usual
    ones (``Impression``), so that a sentence with a colon, or ``LUNGS:`` among the findings, is none.

    Args:
        report: text of a report.
        sections: names of sections in any case, singular or plural; a heading with all words of one is that section.
            Without names it is the whole report.
        otherwise: what a report gives in which all of these are missing or empty: its ``whole`` text, or none.

    Returns:
        The text, None if it would be empty.
    """
    wanted = [phrase_words(name) for name in sections]
    parts = [body for heading, body in _sections(report, wanted) if any(words <= heading for words in wanted)]
    text = " ".join(" ".join(parts).split())
    if not text and (otherwise == "whole" or not wanted):
        text = " ".join(_FIRST_LINE.sub("", report).split())
    return text or None


def _sections(report: str, wanted: Sequence[frozenset[str]]) -> Iterator[tuple[frozenset[str], str]]:
    """Words of each heading, and what stands below it."""
    usual = _HEADING_WORDS.union(*wanted)
    found = [match for match in _HEADING.finditer(report) if _is_heading(match[1], usual)]
    for match, following in zip_longest(found, found[1:]):
        yield phrase_words(match[1]), report[match.end() : following and following.start()]


def _is_heading(phrase: str, usual: frozenset[str]) -> bool:
    words = phrase_words(phrase)
    return bool(words & usual) if phrase.isupper() else bool(words) and words <= usual


def phrase_words(phrase: str) -> frozenset[str]:
    """The words of a heading, in lower case and without the plural's s."""
    return frozenset(word.rstrip("s") for word in re.findall("[a-z]+", phrase.lower())) - _LINKING


_HEADING_WORDS = phrase_words(
    "addendum comparison conclusion diagnosis exam examination findings history impression indication information "
    "notification procedure reason recommendation report study summary technique"
)
