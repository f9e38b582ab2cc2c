"""Code lines by room: lines that are neither blank, nor a comment, nor of a docstring, against what each room may hold.

The figures stand in ``scripts/rooms.toml`` and only fall; ``house.py`` prints and lowers them. A change that
needs more in a room takes it from another in the same commit: one figure rises, the other falls, with the reason.
"""

from __future__ import annotations

import ast
import itertools
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

FIGURES = Path("scripts/rooms.toml")
ZONES = {"source": Path("src/polyfed"), "papers": Path("papers"), "tests": Path("tests")}
TOP = "top"
"""Room of the files at the root."""
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(text: str) -> int:
    """Lines of a source that are neither blank, nor a comment, nor of a docstring."""
    documentation = {
        line for node in docstrings(ast.parse(text)) for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and line.lstrip()[0] != "#" and number not in documentation for number, line in lines)


def docstrings(node: ast.AST) -> Iterator[ast.stmt]:
    """Docstrings of a module and of its definitions; only statements are visited, as ``ast.walk`` is slow."""
    blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody", "handlers", "cases")]
    if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        yield node.body[0]
    for statement in itertools.chain.from_iterable(block for block in blocks if isinstance(block, list)):
        yield from docstrings(statement)


def rooms(root: Path) -> dict[str, int]:
    """Folder just below ``root`` -> code lines of its Python files."""
    held: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        held[parts[0] if len(parts) > 1 else TOP] += code_lines(path.read_text(encoding="utf-8"))
    return dict(sorted(held.items()))


def figures(path: Path = FIGURES) -> dict[str, dict[str, int]]:
    """Zone -> room -> code lines that it may hold; and ``fields``: class -> fields, of those that have too many."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def over(held: Mapping[str, int], may: Mapping[str, int]) -> list[str]:
    """Rooms that hold more than they may; a room without a figure may hold nothing."""
    return [
        f"{room} holds {count} code lines, its figure is {may.get(room, 0)}"
        for room, count in held.items()
        if count > may.get(room, 0)
    ]


def lowered(may: Mapping[str, int], held: Mapping[str, int]) -> dict[str, int]:
    """Figures that fell to what rooms hold; a room that is gone has none."""
    return {room: min(figure, held[room]) for room, figure in may.items() if room in held}


def written(zones: Mapping[str, Mapping[str, int]]) -> str:
    """The file of figures."""
    head = "# Code lines of each room, and fields of classes with more than 15. They only fall; make house lowers them."
    tables = (
        "\n".join([f"[{zone}]", *(f"{room} = {figure}" for room, figure in may.items())]) for zone, may in zones.items()
    )
    return "\n\n".join([head, *tables]) + "\n"


def show() -> None:
    """Print each room next to its figure."""
    may = figures()
    for zone, root in ZONES.items():
        held = rooms(root)
        for room, count in held.items():
            print(f"{zone:8} {room:14} {count:7,} of {may[zone].get(room, 0):7,}")
        print(f"{zone:8} {'in all':14} {sum(held.values()):7,} of {sum(may[zone].values()):7,}")


def write() -> None:
    """Lower the figures of rooms to what they hold."""
    may = figures()
    FIGURES.write_text(
        written(may | {zone: lowered(may[zone], rooms(root)) for zone, root in ZONES.items()}), encoding="utf-8"
    )
