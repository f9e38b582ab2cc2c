"""Counts of prose that is not plain English, by zone and sort; ``tests/test_house.py`` holds them, and they only fall.

    python scripts/language.py                           # the counts
    python scripts/language.py --list src/polyfed/data   # every place below a folder
    python scripts/language.py --write                   # write the counts as the figures

Read are docstrings, comments, texts in quotes and names of the code, and Markdown without its code blocks.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

FIGURES = Path("scripts/language.toml")
ZONES = {
    "source": ("src/polyfed/", "papers/"),
    "tests": ("tests/",),
    "tools": ("scripts/", "benchmarks/"),
    "docs": ("docs/", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
}
_TARGET = re.compile(r"\]\([^)\s]*\)")
_PER = (
    "round client batch second epoch sample cell row seed step site item class modality worker process minute hour day"
)
_COUNTED = "once twice times epochs batches steps bytes samples images seconds rounds clients requests replies MB"
PROSE: Mapping[str, re.Pattern[str]] = {
    "is no": re.compile(r"\b(?:is|are|was|were) (?:no|nothing)\b(?! (?:longer|more|fewer|less)\b)"),
    "nobody": re.compile(r"\b(?:nobody|somebody|anybody|whoever)\b", re.IGNORECASE),
    "a for per": re.compile(rf"\b(?:{'|'.join(_COUNTED.split())}|\d) an? (?:{'|'.join(_PER.split())})\b"),
    "beside": re.compile(r"\bbesides?\b", re.IGNORECASE),
    "picture": re.compile(r"\bpictures?\b", re.IGNORECASE),
    "tells": re.compile(r"\b(?:tells?|told|says?|said)\b", re.IGNORECASE),
}
"""Sort -> its pattern in any prose."""
OPENER = re.compile(r"\s*(?:What|Of|Those|That|They|Whose|Who|As|It|By|Such)\b")
"""A docstring that begins without a subject."""
FRAGMENT = re.compile(r"^\s+\w+: (?:by|that|of|in|to|who|whose|which|what|for|on|with)\b[^:]{0,60}$", re.MULTILINE)
"""A line of arguments or attributes that does not stand alone."""
BANNED = set(
    ["found", "said", "told", "whole", "rest", "places", "kind", "goals", "aims", "ballot", "lessons", "votes"]
)
_TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
Place = tuple[int, str, str]
"""Line, sort, and the words."""


def _in_code(text: str) -> Iterator[Place]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documentation = node.value.value
            if OPENER.match(documentation):
                yield node.lineno, "opener", documentation.strip().split("\n")[0]
            for match in FRAGMENT.finditer(documentation):
                yield node.lineno + documentation.count("\n", 0, match.start()), "fragment", match[0].strip()
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield from _in_prose(node.lineno, node.name.replace("_", " "))
        name = node.arg if isinstance(node, ast.arg) else getattr(node, "id", "")
        if name in BANNED and (isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)):  # type: ignore[attr-defined]
            yield node.lineno, "banned name", name  # type: ignore[attr-defined]
    occurs = any(pattern.search(text) for pattern in PROSE.values())  # in most files not; reading tokens takes long
    for token in tokenize.generate_tokens(io.StringIO(text).readline) if occurs else ():
        if token.type in _TEXTS:
            for number, part in enumerate(token.string.split("\n")):
                yield from _in_prose(token.start[0] + number, part)


def _in_prose(line: int, text: str) -> Iterator[Place]:
    for sort, pattern in PROSE.items():
        for match in pattern.finditer(text):
            yield line, sort, text[max(0, match.start() - 40) : match.end() + 40].strip()


def _in_page(text: str) -> Iterator[Place]:
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced:
            yield from _in_prose(number, _TARGET.sub("]", line))


def occurrences() -> Iterator[tuple[str, str, Place]]:
    """Zone, file and place of every occurrence, in files that git tracks."""
    command = ["git", "ls-files", "*.py", "*.md"]
    for file in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split():
        zone = next((zone for zone, roots in ZONES.items() if file.startswith(roots)), "")
        if zone and Path(file).exists() and file != "scripts/language.py":
            text = Path(file).read_text(encoding="utf-8")
            yield from ((zone, file, place) for place in (_in_code if file.endswith(".py") else _in_page)(text))


def counts() -> dict[str, dict[str, int]]:
    """Zone -> sort -> occurrences."""
    counted = Counter((zone, place[1]) for zone, _, place in occurrences())
    sorts = ["opener", "fragment", "banned name", *PROSE]
    return {zone: {sort: counted[zone, sort] for sort in sorts} for zone in ZONES}


def over() -> list[str]:
    """Zones and sorts that occur more often than their figure."""
    may, held = tomllib.loads(FIGURES.read_text(encoding="utf-8")), counts()
    return [
        f"{zone}: '{sort}' occurs {held[zone][sort]} times, its figure is {most}"
        for zone, sorts in may.items()
        for sort, most in sorts.items()
        if held[zone][sort] > most
    ]


def main(given: list[str]) -> None:
    """Print the counts or the places below a folder; write the figures."""
    if given[:1] == ["--list"]:
        for _, file, (line, sort, words) in occurrences():
            if file.startswith(given[1]):
                print(f"{file}:{line}: {sort}: {words}")
        return
    tables = ["# Occurrences of each sort of prose; they only fall."]
    for zone, sorts in counts().items():
        print(f"{zone:7} {sum(sorts.values()):6,} ", *(f"{sort} {count}," for sort, count in sorts.items()))
        tables.append("\n".join([f"[{zone}]", *(f'"{sort}" = {count}' for sort, count in sorts.items())]))
    if given == ["--write"]:
        FIGURES.write_text("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
