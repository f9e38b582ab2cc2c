"""How deep and how wide the classes of polyfed are, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from imports import Module


@dataclass(frozen=True)
class ClassFacts:
    """A class at the top of a module.

    Attributes:
        name: of the class.
        place: path and line of its source.
        bases: names of what it extends.
        fields: annotated names in its body, without those of the class alone and without private ones.
    """

    name: str
    place: str
    bases: tuple[str, ...]
    fields: frozenset[str]


def classes(parts: list[Module]) -> dict[str, ClassFacts]:
    """Classes by name; public names stand for one class each."""
    return {facts.name: facts for module in parts for facts in _of(module)}


def _of(module: Module) -> Iterator[ClassFacts]:
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef):
            bases = tuple(name for base in node.bases if (name := _last_name(base)))
            yield ClassFacts(node.name, f"{module.path}:{node.lineno} {node.name}", bases, frozenset(_fields(node)))


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            if not name.startswith("_") and not ast.unparse(statement.annotation).startswith("ClassVar"):
                yield name


def ancestors(name: str, known: dict[str, ClassFacts]) -> list[str]:
    """Classes of polyfed that a class extends, directly or not, each once, the nearest first."""
    above: list[str] = []
    waiting = list(known[name].bases)
    while waiting:
        base = waiting.pop(0)
        if base in known and base != name and base not in above:
            above.append(base)
            waiting.extend(known[base].bases)
    return above


def fields(name: str, known: dict[str, ClassFacts]) -> frozenset[str]:
    """Fields of a class, inherited ones too."""
    return known[name].fields.union(*(known[base].fields for base in ancestors(name, known)))
