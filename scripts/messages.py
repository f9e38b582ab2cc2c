"""Every error message of the package, found in its code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "polyfed"
OWN = "PolyfedError"
OF_ARGUMENTS = ("ValueError", "TypeError")
"""Errors of wrong arguments; in the settings of an experiment they become a ConfigError."""

_COMMANDS = ("fail", "BadParameter", "ClickException", "UsageError")


@dataclass(frozen=True)
class Message:
    """One place in the code that makes an error.

    Attributes:
        error: Class of the error.
        text: Its message, with expressions in ‹›.
        module: Dotted name below ``polyfed``.
        purpose: First paragraph of the docstring of the function or class around it.
    """

    error: str
    text: str
    module: str
    purpose: str


def messages(source: Path = SOURCE) -> list[Message]:
    """All messages, in the order of modules and lines."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(source.rglob("*.py"))}
    kinds = error_classes(list(trees.values()))
    return [message for path, tree in trees.items() for message in _in_module(_dotted(path, source), tree, kinds)]


def error_classes(trees: list[ast.Module]) -> set[str]:
    """Names of the package's error classes, and of those of wrong arguments."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    kinds, before = {OWN}, 0
    while len(kinds) > before:
        before = len(kinds)
        kinds |= {node.name for node in classes if any(_name(base) in kinds for base in node.bases)}
    return kinds | set(OF_ARGUMENTS) | set(_COMMANDS)


def _in_module(module: str, tree: ast.Module, kinds: set[str]) -> Iterator[Message]:
    for node, owners in _with_owners(tree, ()):
        if isinstance(node, ast.Call) and _name(node.func) in kinds and node.args:
            purpose = next(filter(None, (_summary(owner) for owner in reversed(owners))), "")
            yield Message(_name(node.func), template(node.args[0]), module, purpose)


_Owner = ast.Module | ast.ClassDef | ast.FunctionDef


def _with_owners(node: ast.AST, owners: tuple[_Owner, ...]) -> Iterator[tuple[ast.AST, tuple[_Owner, ...]]]:
    """Every node with the module, classes and functions around it, outermost first."""
    inside = (*owners, node) if isinstance(node, _Owner) else owners
    for child in ast.iter_child_nodes(node):
        yield child, inside
        yield from _with_owners(child, inside)


def template(message: ast.expr) -> str:
    """Text of a message; an expression in it stands as its source in ‹›."""
    match message:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(template, parts))
        case ast.FormattedValue(value=value):
            return f"‹{ast.unparse(value)}›"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{template(body)} | {template(orelse)}"
        case _:
            return f"‹{ast.unparse(message)}›"


def _summary(owner: _Owner) -> str:
    paragraph = (ast.get_docstring(owner) or "").split("\n\n")[0]
    return " ".join(paragraph.split())


def _name(expression: ast.expr) -> str:
    return getattr(expression, "attr", getattr(expression, "id", ""))


def _dotted(path: Path, source: Path) -> str:
    return ".".join(path.relative_to(source).with_suffix("").parts)
