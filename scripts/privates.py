"""Private names of polyfed that tests reach for, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from imports import Module


def reached_privates(tests: list[Module], parts: list[Module]) -> list[str]:
    """Places in tests that read, import or replace a private name which a module of ``parts`` defines.

    A test's own ``self`` is its own affair. Who owns an object is not known from its source, so another object counts
    if polyfed has that name anywhere.
    """
    known = {name for module in parts for node in ast.walk(module.tree) for name in _defined(node) if _private(name)}
    return [
        f"{module.path}:{line} {name}"
        for module in tests
        for node in ast.walk(module.tree)
        for line, name in _reached(node)
        if name in known
    ]


def _private(name: str) -> bool:
    return name.startswith("_") and name != "_" and not name.endswith("_") and not name.startswith("__")


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.attr if isinstance(node, ast.Attribute) else node.id


def _reached(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Attribute):
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            yield node.lineno, node.attr
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("polyfed"):
        yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("attr"):
        named = [argument for argument in node.args[:2] if isinstance(argument, ast.Constant)]  # monkeypatch.setattr
        yield from ((node.lineno, str(argument.value).rpartition(".")[2]) for argument in named[:1])
