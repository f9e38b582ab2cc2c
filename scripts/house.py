"""The figures of the house, against what docs/decisions.md says that they should be: ``make house``.

    python scripts/house.py            # all figures; exit status 1 if one slips
    python scripts/house.py --worst    # with the places that spoil each

Complexity is McCabe's as radon counts it (``ruff check`` counts its own); duplication is the share of lines in runs of
six or more that stand twice, names and all.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from classes import ancestors, classes, fields
from frames import frames_to_backward
from imports import Module, cycles, modules, upward
from privates import reached_privates
from reach import Package, Reach

SOURCE = Path("src/polyfed")
BESIDE = ("yaml", "j2", "css", "js")
RUN = 6  # lines that make a duplicate
MADE = re.compile(r"<!-- made by:.*?<!-- end of[^>]*-->", re.DOTALL)  # blocks of pages
# what a method is written in terms of, and what it takes for granted; see reach.py
EDGE = ("federation", "data", "models", "tasks", "optim", "privacy")
APART = ("engines", "wire", "core")
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Figure:
    """One figure and its limits."""

    name: str
    value: float
    most: float
    least: float = 0
    worst: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether it is within its limits."""
        return self.least <= self.value <= self.most

    def __str__(self) -> str:
        bounds = f"{self.least:g} to {self.most:g}" if self.least else f"at most {self.most:g}"
        return f"{'ok  ' if self.holds else 'OVER'}  {self.name:45} {self.value:>9,.6g}   {bounds}"


def function_lines(module: Module) -> Iterator[tuple[int, str]]:
    """Lines of each function without its docstring and without those of functions within it."""
    for node in ast.walk(module.tree):
        if isinstance(node, FUNCTION):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            inner = {
                line
                for child in ast.walk(node)
                if child is not node and isinstance(child, FUNCTION)
                for line in _span(child)
            }
            lines = {line for statement in body for line in _span(statement)} - inner
            code = sum(bool(module.lines[line - 1].strip()) for line in lines)
            yield code, f"{module.path}:{node.lineno} {node.name}"


def _span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def comment_lines(module: Module) -> int:
    """Comments, without those that speak to tools."""
    with module.path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    return sum(not token.string.startswith(("# noqa", "# type:", "# pragma")) for token in tokens)


def code_lines(module: Module) -> list[str]:
    """Lines that hold code: no docstrings, comments, imports or blank ones."""
    hidden: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ):
            hidden |= set(_span(node))
    kept = [line.strip() for number, line in enumerate(module.lines, 1) if number not in hidden]
    return [line for line in kept if line and not line.startswith("#")]


def duplicated(parts: list[Module]) -> tuple[float, list[str]]:
    """Share of the lines of code that are in runs which stand twice, per cent, and where."""
    seen: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    total = 0
    for module in parts:
        lines = [line for line in code_lines(module) if len(line) > 3]  # brackets alone say nothing
        total += len(lines)
        for start in range(len(lines) - RUN + 1):
            seen[tuple(lines[start : start + RUN])].append((module.path, start))
    twice = {
        (path, start + step)
        for places in seen.values()
        if len(places) > 1
        for path, start in places
        for step in range(RUN)
    }
    counts = Counter(str(path) for path, _ in twice)
    return 100 * len(twice) / total, [f"{path}: {count} lines" for path, count in counts.most_common(8)]


def public_names(parts: list[Module]) -> dict[str, list[str]]:
    """Public classes, functions and constants at the top of modules -> where they are defined.

    ``log``, the logger of a module, means the same everywhere.
    """
    places: dict[str, list[str]] = defaultdict(list)
    for module in parts:
        for node in module.tree.body:
            for name in _defined(node):
                if not name.startswith("_") and name != "log":
                    places[name].append(module.name)
    return places


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def figures() -> Iterator[Figure]:
    """All of them."""
    parts = modules(SOURCE)
    functions = sorted((pair for module in parts for pair in function_lines(module)), reverse=True)
    sizes = [size for size, _ in functions]
    files = sorted(((len(module.lines), str(module.path)) for module in parts), reverse=True)
    worst = [f"{place}: {size}" for size, place in functions[:8]]
    yield Figure("lines of a function, median", median(sizes), 8)
    yield Figure("lines of a function, 90th percentile", quantiles(sizes, n=10)[-1], 28, worst=worst)
    yield Figure("lines of the longest file", files[0][0], 400, worst=[f"{path}: {size}" for size, path in files[:8]])
    yield _complexity(parts)
    yield Figure("imports that run upwards", len(up := upward(parts)), 0, worst=up)
    yield Figure(
        "modules in cycles of imports",
        sum(map(len, loops := cycles(parts))),
        0,
        worst=[" ".join(loop) for loop in loops],
    )
    share, places = duplicated(parts)
    yield Figure("lines in duplicates, per cent", share, 3, worst=places)
    total = sum(len(module.lines) for module in parts)
    yield Figure(
        "comments in 100 lines of code",
        100 * sum(map(comment_lines, parts)) / sum(len(code_lines(m)) for m in parts),
        9,
        4,
    )
    several = {name: where for name, where in public_names(parts).items() if len(where) > 1}
    yield Figure(
        "public names defined twice",
        len(several),
        0,
        worst=[f"{name}: {', '.join(where)}" for name, where in several.items()],
    )
    yield from _shape_of_classes(parts)
    yield Figure("lines of source", total, 56_000)
    beside = [path for ending in BESIDE for path in SOURCE.rglob(f"*.{ending}")]
    yield Figure("lines of YAML, templates, styles, scripts", _lines(beside), 9_500)
    yield Figure("lines of tests", _lines(Path("tests").rglob("*.py")), 48_000)
    yield from _to_understand(Package(parts))
    yield _depth()
    reached = reached_privates(modules(Path("tests")), parts)
    yield Figure("private names in tests", len(reached), 0, worst=reached)
    written = [path for path in Path("docs").rglob("*.md") if not _is_made(path)]
    yield Figure("words of docs", sum(len(MADE.sub("", path.read_text()).split()) for path in written), 45_000)


def _is_made(path: Path) -> bool:
    """Whether ``make pages`` writes all of it, so that it grows with what is run; so do blocks of other pages."""
    return path.parent == Path("docs/results") or path == Path("docs/reproduction.md")


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def _shape_of_classes(parts: list[Module]) -> Iterator[Figure]:
    known = classes(parts)
    above = sorted(((len(ancestors(name, known)), facts.place) for name, facts in known.items()), reverse=True)
    yield Figure(
        "classes of polyfed above one", above[0][0], 3, worst=[f"{place}: {deep}" for deep, place in above if deep > 3]
    )
    wide = sorted(((len(fields(name, known)), facts.place) for name, facts in known.items()), reverse=True)
    worst = [f"{place}: {count}" for count, place in wide if count > 15]
    yield Figure("fields of a class, inherited ones too", wide[0][0], 15, worst=worst)
    for name, most in (("Cohort", 10), ("Site", 8)):
        yield Figure(f"fields of {name}", len(fields(name, known)), most)


def _to_understand(package: Package) -> Iterator[Figure]:
    for name, most in (("creamfl.py:CreamFL", 10), ("fedavg.py:FedAvg", 8)):
        reach = Reach(package, APART, EDGE)
        reach.start(f"algorithms/{name}.round")
        worst = [f"{path}: {', '.join(sorted(names))}" for path, names in sorted(reach.functions.items())]
        yield Figure(f"files to understand {name.partition(':')[2]}.round", len(worst), most, worst=worst)


def _depth() -> Figure:
    sys.path[:0] = ["src", "tests"]
    from small_federations import tiny_experiment

    way = frames_to_backward(tiny_experiment())
    return Figure("frames from FedAvg.round to backward", len(way), 12, worst=way)


def _complexity(parts: list[Module]) -> Figure:
    from radon.complexity import cc_visit

    functions = [
        (block.complexity, f"{module.path}:{block.lineno} {block.name}")
        for module in parts
        for block in _blocks(cc_visit("\n".join(module.lines)))
    ]
    functions.sort(reverse=True)
    worst = [f"{place}: {complexity}" for complexity, place in functions if complexity > 10]
    return Figure("McCabe's complexity, as radon counts", functions[0][0], 10, worst=worst)


def _blocks(visited: list) -> Iterator:  # type: ignore[type-arg]
    for block in visited:
        if hasattr(block, "methods"):
            yield from block.methods
        else:
            yield block


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worst", action="store_true")
    options = parser.parse_args()
    measured = list(figures())
    for figure in measured:
        print(figure)
        for place in figure.worst if options.worst else ():
            print(f"          {place}")
    return 0 if all(figure.holds for figure in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
