"""The rules of the house: ``make house``; ``tests/test_house.py`` holds them in ``make test``.

    python scripts/house.py            # each rule, and its violations; exit status 1 if there are any
    python scripts/house.py --write    # the same, and figures of rooms fall to what they hold

Bounded are code lines by room (``rooms.py``), imports (``imports.py``: downwards, no circles, those for types too),
duplicates, McCabe's complexity, fields of public classes and prose (``language.py``). Printed, and not bounded: the
code that a traced run of a method enters (``traced.py``).
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import language
import rooms
from imports import Module, cycles, modules, upward

SOURCE = rooms.ZONES["source"]
RUN = 6
"""Lines that make a duplicate."""
DUPLICATES = 5.0
"""Percentage of the code lines that may stand twice."""
COMPLEXITY, FIELDS = 10, 15


def full_rooms() -> list[str]:
    """Rooms that hold more code lines than their figure."""
    may = rooms.figures()
    return [line for zone, root in rooms.ZONES.items() for line in rooms.over(rooms.rooms(root), may[zone])]


def circles(parts: list[Module]) -> list[str]:
    """Modules or packages that import each other."""
    return [" ".join(circle) for circle in cycles(parts)]


def duplicates(parts: list[Module]) -> list[str]:
    """Files with lines that stand twice, in runs of six or more, if these are too many in all."""
    seen: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    total = 0
    for module in parts:
        lines = [line for line in _code(module) if len(line) > 3]  # brackets alone do not count
        total += len(lines)
        for start in range(len(lines) - RUN + 1):
            seen[tuple(lines[start : start + RUN])].append((module.path, start))
    repeated = [start for starts in seen.values() if len(starts) > 1 for start in starts]
    twice = {(path, start + step) for path, start in repeated for step in range(RUN)}
    if 100 * len(twice) <= DUPLICATES * total:
        return []
    counts = Counter(str(path) for path, _ in twice)
    return [f"{path}: {count} lines" for path, count in counts.most_common(8)]


def _code(module: Module) -> Iterator[str]:
    """Lines without docstrings, comments, imports and blank ones."""
    hidden: set[int] = set()
    for node in ast.walk(module.tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or is_text:
            hidden.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(module.lines, 1):
        if number not in hidden and line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def complex_functions() -> list[str]:
    """Functions of a McCabe complexity above 10."""
    limit = f"lint.mccabe.max-complexity={COMPLEXITY}"
    command = ["ruff", "check", "--select=C901", "--config", limit, "--output-format=concise", "--quiet", str(SOURCE)]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines()


def classes(parts: list[Module]) -> dict[str, tuple[str, list[str], set[str]]]:
    """Class -> its place, its bases, and the public fields that its body annotates."""
    return {
        node.name: (f"{module.path}:{node.lineno} {node.name}", _bases(node), _fields(node))
        for module in parts
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    }


def _bases(node: ast.ClassDef) -> list[str]:
    plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [getattr(base, "id", getattr(base, "attr", "")) for base in plain]


def _fields(node: ast.ClassDef) -> set[str]:
    annotated = [line for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
    return {
        ast.unparse(line.target)
        for line in annotated
        if not ast.unparse(line).startswith("_") and not ast.unparse(line.annotation).startswith("ClassVar")
    }


def fields(name: str, known: Mapping[str, tuple[str, list[str], set[str]]]) -> set[str]:
    """Fields of a class, inherited ones too."""
    _, bases, own = known[name]
    return own.union(*(fields(base, known) for base in bases if base in known and base != name))


def wide_classes(parts: list[Module], may: Mapping[str, int]) -> list[str]:
    """Public classes of more than 15 fields, inherited ones too, or more than their own figure."""
    known = classes(parts)
    counts = {name: len(fields(name, known)) for name in known if not name.startswith("_")}
    return [
        f"{known[name][0]}: {count} fields, at most {may.get(name, FIELDS)}"
        for name, count in counts.items()
        if count > may.get(name, FIELDS)
    ]


RULES: Mapping[str, Callable[[list[Module]], list[str]]] = {
    "code lines by room": lambda _: full_rooms(),
    "imports run downwards": upward,
    "no circles of imports": circles,
    f"at most {DUPLICATES:g} % of the lines stand twice": duplicates,
    f"McCabe's complexity is at most {COMPLEXITY}": lambda _: complex_functions(),
    f"public classes have at most {FIELDS} fields": lambda parts: wide_classes(parts, rooms.figures()["fields"]),
    "prose is plain English": lambda _: language.over(),
}
"""Rule -> function that lists its violations."""


def main() -> int:
    """Print all rules, and lower the figures of rooms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="lower the figures of rooms to what they hold")
    if parser.parse_args().write:
        rooms.write()
    rooms.show()
    violations = {rule: check(modules(SOURCE)) for rule, check in RULES.items()}
    for rule, lines in violations.items():
        print(f"{'OVER' if lines else 'ok  '}  {rule}", *lines, sep="\n          ")
    sys.path[:0] = ["src", "tests"]
    from traced import show  # runs methods

    show()
    return 1 if any(violations.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
