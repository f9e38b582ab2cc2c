"""Components as their source declares them: to name one takes neither torch nor an extra that is not installed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

ClassPlace = tuple[str, str]
"""Module and name of a class."""


@dataclass(frozen=True)
class ClassDeclaration:
    """A class of a module, unimported.

    Attributes:
        name: of the class.
        documentation: its docstring.
        bases: where its bases are defined, as far as their names tell.
        open_names: abstract methods of its own body.
        closed_names: what its own body defines or assigns otherwise.
        texts: class attributes whose values are plain strings.
    """

    name: str
    documentation: str
    bases: tuple[ClassPlace, ...]
    open_names: frozenset[str]
    closed_names: frozenset[str]
    texts: Mapping[str, str]


def components(home: str, family: ClassPlace) -> dict[str, ClassDeclaration]:
    """The components of a family by short name, in alphabetical order, that the modules of its home hold."""
    top, *parts = home.split(".")
    files = sorted(entry.name for entry in resources.files(top).joinpath(*parts).iterdir())
    names = [file.removesuffix(".py") for file in files if file.endswith(".py") and file != "__init__.py"]
    known = {name: declared_component(home, name, family) for name in names}
    return {name: declared for name, declared in known.items() if declared is not None}


def declared_component(home: str, name: str, family: ClassPlace) -> ClassDeclaration | None:
    """The public, concrete class of ``family`` in a module of the family's home, or None if there is none."""
    module = f"{home}.{name}"
    own = [
        declared
        for declared in class_declarations(module).values()
        if not declared.name.startswith("_") and _descends((module, declared.name), family)
    ]
    return next((declared for declared in own if not _open_names((module, declared.name))), None)


@cache
def class_declarations(module: str) -> Mapping[str, ClassDeclaration]:
    """Classes of a module by name; none if its source is not there."""
    source = _source(module)
    if source is None:
        return {}
    tree = ast.parse(source)
    imported = dict(_imported_names(tree))
    return {node.name: _declared(node, module, imported) for node in tree.body if isinstance(node, ast.ClassDef)}


def _source(module: str) -> str | None:
    top, *parts = module.split(".")
    if not parts:
        return None
    try:
        file = resources.files(top).joinpath(*parts[:-1], f"{parts[-1]}.py")
    except ModuleNotFoundError:
        return None
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _imported_names(tree: ast.Module) -> Iterator[tuple[str, ClassPlace]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, (node.module, alias.name)


def _declared(node: ast.ClassDef, module: str, imported: Mapping[str, ClassPlace]) -> ClassDeclaration:
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]  # Generic[T]
    names = [base.id for base in bases if isinstance(base, ast.Name)]
    opened = {item.name for item in node.body if isinstance(item, ast.FunctionDef) and _is_abstract(item)}
    return ClassDeclaration(
        name=node.name,
        documentation=ast.get_docstring(node) or "",
        bases=tuple(imported.get(name, (module, name)) for name in names),
        open_names=frozenset(opened),
        closed_names=frozenset(_bound_names(node)) - opened,
        texts=dict(_texts(node)),
    )


def _is_abstract(function: ast.FunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "abstractmethod" for mark in function.decorator_list)


def _bound_names(node: ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            yield item.name
    for name, _ in _assignments(node):
        yield name


def _texts(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for name, value in _assignments(node):
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield name, value.value


def _assignments(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    for item in node.body:
        if isinstance(item, ast.Assign | ast.AnnAssign):
            for target in item.targets if isinstance(item, ast.Assign) else [item.target]:
                if isinstance(target, ast.Name):
                    yield target.id, item.value


def _descends(place: ClassPlace, family: ClassPlace) -> bool:
    declared = class_declarations(place[0]).get(place[1])
    return declared is not None and (place == family or any(_descends(base, family) for base in declared.bases))


def _open_names(place: ClassPlace) -> set[str]:
    """Abstract methods that nobody nearer in the ancestry defines."""
    nearest: dict[str, bool] = {}
    for ancestor in _ancestry(place):
        declared = class_declarations(ancestor[0])[ancestor[1]]
        nearest = dict.fromkeys(declared.open_names, True) | dict.fromkeys(declared.closed_names, False) | nearest
    return {name for name, is_open in nearest.items() if is_open}


def _ancestry(place: ClassPlace) -> list[ClassPlace]:
    """A class and those above it, a shared one after all that inherit from it."""
    declared = class_declarations(place[0]).get(place[1])
    if declared is None:
        return []
    above = [ancestor for base in declared.bases for ancestor in _ancestry(base)]
    return [place, *(ancestor for k, ancestor in enumerate(above) if ancestor not in above[k + 1 :])]
