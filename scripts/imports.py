"""Imports among modules of polyfed, read from their source: layers, upward imports, cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.sparse.csgraph import connected_components

LAYERS = (
    ("cli",),
    ("lab", "deploy", "export"),
    ("reporting",),
    ("runs",),
    ("engines",),
    ("algorithms",),
    ("federation",),
    ("wire", "tasks", "aggregation", "privacy"),
    ("models", "partitions", "optim"),
    ("data",),
    ("losses", "core"),
)
"""Packages from the top; one imports those below it and those of its own layer."""

DEPTH = {package: depth for depth, layer in enumerate(LAYERS) for package in layer}
PUBLIC, PRESETS = "polyfed", "polyfed.presets"
PROGRAM = "polyfed.__main__"  # of ``python -m polyfed``, and the one module outside cli that imports it


@dataclass(frozen=True)
class Module:
    """A module of the package.

    Attributes:
        name: Dotted name.
        path: File of its source.
    """

    name: str
    path: Path

    @cached_property
    def lines(self) -> list[str]:
        """Lines of its source."""
        return self.path.read_text(encoding="utf-8").splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree of its source."""
        return ast.parse("\n".join(self.lines))

    @property
    def package(self) -> str:
        """The package below polyfed; nothing for a module at the root."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 2 or parts[-1] in DEPTH else ""


def modules(root: Path) -> list[Module]:
    """All modules of a package, by the path of its folder."""
    every = []
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        every.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return every


def imports(module: Module, known: Mapping[str, Module], *, at_once: bool = False) -> set[str]:
    """Modules of the package that a module imports; with ``at_once`` those that it needs to be imported itself."""
    nodes = _run_at_import(module.tree) if at_once else ast.walk(module.tree)
    return {name for node in nodes for name in _imported(node, known)} - {module.name}


def _run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_types(node):
            continue
        yield node
        yield from _run_at_import(node)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imported(node: ast.AST, known: Mapping[str, Module]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if name in known:
                yield name
            elif node.module in known:
                yield node.module


def upward(parts: list[Module]) -> list[str]:
    """Imports that do not run downwards, and modules at the root."""
    known = {module.name: module for module in parts}
    faults = [
        f"{name} stands at the root"
        for name, module in known.items()
        if not module.package and name not in (PUBLIC, PRESETS, PROGRAM)
    ]
    for module in parts:
        for name in sorted(imports(module, known)) if module.package else ():
            other = known[name].package
            if (
                name not in (PUBLIC, PRESETS) and (not other or DEPTH[other] < DEPTH[module.package])
            ) or name == PUBLIC:
                faults.append(f"{module.name} -> {name}")
    return faults


def cycles(parts: list[Module]) -> list[list[str]]:
    """Modules, and packages, that import each other, in functions and for types alone too; a list for each cycle."""
    known = {module.name: module for module in parts}
    needs = {module.name: imports(module, known) for module in parts if module.name != PUBLIC}
    packages: dict[str, set[str]] = {}
    for module in parts:
        if module.package:
            others = {known[name].package for name in imports(module, known)}
            packages.setdefault(module.package, set()).update(others - {module.package, ""})
    return [*_cycles(needs), *_cycles(packages)]


def _cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node."""
    names = sorted(edges)
    links = [[other in edges[name] for other in names] for name in names]
    _, labels = connected_components(np.array(links, dtype=bool).reshape(len(names), -1), connection="strong")
    components = [[name for name, own in zip(names, labels, strict=True) if own == label] for label in {*labels}]
    return sorted(component for component in components if len(component) > 1)
