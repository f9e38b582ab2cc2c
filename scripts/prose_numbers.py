"""Check that the records cited by hand-written prose have the numbers that it states as results.

    python scripts/prose_numbers.py     # those that no record has

Read are decimals, signed numbers, percents and points: in the README, in templates of pages, and of docs/explanation in
paragraphs that link to a page of papers/ or stand under one of ``SECTIONS``. A paragraph's records are those of the
studies that it names (``t3.yaml``, Table 3, a link to a section), or that one before it in its section names; without
a name, all of its paper.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyfed.reporting.statistics import PairedSample
from record_checks import exceptions, standing
from study_records import PAPERS, StudyRecord

ROOT = PAPERS.parent
EXPLANATION = "docs/explanation"
PAPERS_OF = ("creamfl", "fedcola", "fedafd", "fedaid")
"""Pages of docs/explanation whose studies lie in a folder of the same name; other pages cite polyfed's own."""
SECTIONS = ("The scale small", "Where its claims hold", "What it brings here", "Change or absolute", "What came out")
_MADE = re.compile(r"<!-- made by: make pages -->.*?<!-- end of what make pages makes -->|\{%.*?%\}|\{\{.*?\}\}", re.S)
_ASIDE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+", re.S)
_NUMBER = re.compile(r"(?<![\w.,/-])([+-]?)(\d+\.\d+|\d+(?= %| points?\b)|(?<=[+-])\d+)(?![\w/]|\.\d)")
_ITEM = re.compile(r"\b(Table|Figure) (\d+)")
_FILE = re.compile(r"(?:papers/(\w+)/)?([\w-]+)\.yaml")
_ANCHOR = re.compile(r"README\.md#([\w-]+)")


@dataclass(frozen=True)
class Paragraph:
    """A paragraph, list or table.

    Attributes:
        file: Path below the repository.
        text: Its text.
        before: Paragraphs before it in its section.
    """

    file: str
    text: str
    before: Sequence[str] = ()

    @property
    def numbers(self) -> list[str]:
        """Numbers as written: ``-2.8``, ``9.1``, ``18``."""
        return [sign + digits for sign, digits in _NUMBER.findall(_ASIDE.sub(" ", self.text.replace("−", "-")))]

    def records(self, shown: Sequence[StudyRecord]) -> list[StudyRecord]:
        """Records that it cites, or else those of the nearest paragraph before it in its section."""
        own = Path(self.file).stem if Path(self.file).stem in PAPERS_OF else "polyfed"
        for text in (self.text, *reversed(self.before)):
            names = {f"{folder or own}/{name}" for folder, name in _FILE.findall(text)}
            names |= {f"{own}/{item[0].lower()}{number}" for item, number in _ITEM.findall(text)}
            if names or _ANCHOR.search(text):
                anchors = set(_ANCHOR.findall(text))
                return [one for one in shown if one.name in names or one.anchor in anchors]
        return [one for one in shown if one.name.startswith(f"{own}/")]


def paragraphs(root: Path = ROOT) -> Iterator[Paragraph]:
    """All that are read."""
    for path in (root / "README.md", *sorted((Path(__file__).parent / "templates").glob("*.md*"))):
        yield from _of(path, root, lambda heading, text: True)
    for path in sorted((root / EXPLANATION).glob("*.md")):
        yield from _of(path, root, lambda heading, text: heading in SECTIONS or _cites(text))


def _cites(text: str) -> bool:
    return bool(re.search(r"papers/\w+/README\.md", text))


def _of(path: Path, root: Path, is_read: Callable[[str, str], bool]) -> Iterator[Paragraph]:
    heading, before = "", list[str]()
    for text in re.split(r"\n\s*\n", _MADE.sub(" ", path.read_text(encoding="utf-8"))):
        if text.startswith("#"):
            heading, before = text.partition("\n")[0].lstrip("# "), []
        elif is_read(heading, text):
            yield Paragraph(path.relative_to(root).as_posix(), text, (*before,))
        before.append(text)


def unsupported(paragraph: Paragraph, shown: Sequence[StudyRecord]) -> list[str]:
    """Numbers of a paragraph that none of its records has."""
    if not paragraph.numbers:
        return []
    values = {value for record in paragraph.records(shown) for value in _values(record)}
    return [number for number in paragraph.numbers if not _has(values, number)]


def _has(values: set[float], number: str) -> bool:
    """True if a value, rounded alike, is the number; without a sign, if its size is."""
    digits = len(number.partition(".")[2])
    half = 0.5 * 10**-digits + 1e-9
    given = float(number)
    signed = number[0] in "+-"
    return any(abs((value if signed else abs(value)) - given) <= half for value in values)


_VALUES: dict[str, tuple[StudyRecord, set[float]]] = {}


def _values(record: StudyRecord) -> set[float]:
    """Means, deviations, differences with their intervals and p, counts, and settings."""
    of, values = _VALUES.get(record.label, (None, set[float]()))
    if of is not record:
        values = {*_of_cells(record), *_of_claims(record), *_of_settings(record)}
        _VALUES[record.label] = record, values
    return values


def _of_cells(record: StudyRecord) -> Iterator[float]:
    results, study = record.results, record.study
    for (row, point, column), by_seed in results.values.items():
        spread = results.spread(row, point, column)
        yield from (spread.mean, spread.std, *by_seed.values())
        others = [(other, point, column) for other in study.rows] + [(row, other, column) for other in study.points]
        for place in others:
            sample = results.difference((row, point, column), place)
            if sample is not None and place != (row, point, column):
                yield from _of_sample(sample)


def _of_sample(sample: PairedSample) -> Iterator[float]:
    yield sample.mean
    if len(sample.by_seed) > 1:
        yield from sample.interval
        yield (sample.interval[1] - sample.interval[0]) / 2


def _of_claims(record: StudyRecord) -> Iterator[float]:
    for item in record.judgements:
        if item.comparison:
            yield from (item.comparison.p, item.comparison.estimate, *item.comparison.interval)
        if isinstance(item.sample, PairedSample):
            yield from _of_sample(item.sample)
    for _, sample in record.results.readings():
        if isinstance(sample, PairedSample):
            yield from _of_sample(sample)
    for item in record.results.chosen.values():
        yield from (*item.scores.values(), *item.factors.values())
    yield from map(float, Counter(item.verdict for item in record.judgements).values())


def _of_settings(record: StudyRecord) -> Iterator[float]:
    yield from (float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", str(record.study.content())))


def faults(root: Path = ROOT) -> list[str]:
    """Numbers that no record has and no exception names, a line a paragraph; exceptions that are not needed."""
    shown, known = standing(), {*exceptions()["numbers"]}
    unknown, needed = [], set[str]()
    for paragraph in paragraphs(root):
        left = []
        for number in unsupported(paragraph, shown):
            keys = {paragraph.file, f"{paragraph.file}: {number}"}
            needed |= keys
            left += [number] * (not keys & known)
        if left:
            unknown.append(
                f"{paragraph.file}: no record has {', '.join(left)}: {' '.join(paragraph.text.split())[:90]}"
            )
    return unknown + [f"exceptions.toml: numbers: {key} is not needed: take it out" for key in sorted(known - needed)]


def main() -> int:
    """Print them."""
    unsupported_numbers = faults()
    print(*unsupported_numbers, sep="\n")
    return 1 if unsupported_numbers else 0


if __name__ == "__main__":
    sys.exit(main())
