"""Components as their source declares them: to name one takes neither torch nor an extra that is not installed.

Of components outside polyfed the source is part of what a run is: it may change while their settings stay.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polyfed.core.errors import ConfigError
from polyfed.core.untrusted import require_own_code

if TYPE_CHECKING:
    from pydantic import BaseModel

SHORT_NAME = "short_name"
"""Class attribute of a component that shares its module with others of its family: what it is called."""

ClassPlace = tuple[str, str]
"""Module and name of a class."""


@dataclass(frozen=True)
class ClassDeclaration:
    """A class of a module, unimported.

    Attributes:
        module: Module of the class.
        name: Name of the class.
        documentation: its docstring.
        bases: Places of its bases, where imports show them.
        is_open: names that its own body defines or assigns -> whether they are abstract methods.
        texts: class attributes whose values are plain strings.
        fields: attributes that its own body annotates, in order -> annotation.
        imported: Names that its module imports -> their places.
    """

    module: str
    name: str
    documentation: str
    bases: tuple[ClassPlace, ...]
    is_open: Mapping[str, bool]
    texts: Mapping[str, str]
    fields: Mapping[str, str]
    imported: Mapping[str, ClassPlace]


def homes_of(home: str) -> list[str]:
    """Packages or modules that hold components of a family: its home, and the home's namesake in the zone of
    deployment, where there is one (``polyfed.engines`` and ``polyfed.deploy.engines``)."""
    top, *parts = home.split(".")
    return [place for place in (home, ".".join((top, "deploy", *parts))) if _modules(place)]


def components(home: str, family: ClassPlace) -> dict[str, ClassDeclaration]:
    """The components of a family by short name, in alphabetical order, that the modules of its homes hold."""
    modules = [module for place in homes_of(home) for module in _modules(place)]
    return dict(sorted((short, declared) for module in modules for short, declared in _components_in(module, family)))


@cache
def _modules(place: str) -> list[str]:
    """Modules of a package; of a module itself; none where there is neither."""
    top, *parts = place.split(".")
    folder = resources.files(top).joinpath(*parts)
    if not (folder / "__init__.py").is_file():  # a folder of old bytecode is not a package
        return [place] if _source(place) is not None else []
    files = (entry.name for entry in folder.iterdir())
    return [f"{place}.{file[:-3]}" for file in files if file.endswith(".py") and file != "__init__.py"]


@cache  # asked for every component of every experiment that is read
def declared_component(home: str, name: str, family: ClassPlace) -> ClassDeclaration | None:
    """The component of that short name, or None if there is none."""
    for place in homes_of(home):  # most are alone in a module of their name, and no other need be read
        if declared := dict(_components_in(f"{place}.{name}", family)).get(name):
            return declared
    return components(home, family).get(name)


def _components_in(module: str, family: ClassPlace) -> Iterator[tuple[str, ClassDeclaration]]:
    """Short name and class of the public, concrete classes of ``family`` in a module."""
    for declared in class_declarations(module).values():
        above = ancestry((declared.module, declared.name))
        if declared.name.startswith("_") or family not in [(one.module, one.name) for one in above]:
            continue
        # the nearest in the ancestry counts
        is_open = {name: value for one in reversed(above) for name, value in one.is_open.items()}
        if not any(is_open.values()):
            yield declared.texts.get(SHORT_NAME, module.rpartition(".")[2]), declared


# the header and the body, each line of which is empty, closes the header, or stands deeper than it
_FUNCTION = re.compile(r"^( *)(?:async )?def (\w+).*\n(?:(?:\1[ )].*)?\n)*", re.MULTILINE)


@cache
def class_declarations(module: str) -> Mapping[str, ClassDeclaration]:
    """Classes of a module by name; none if its source is not there."""
    if (source := _source(module)) is None:
        return {}
    try:  # bodies of functions take five sixths of the time
        tree = ast.parse(_FUNCTION.sub(r"\1def \2(): ...\n", source))
    except SyntaxError:  # a body has lines without indentation, such as a comment or a text
        tree = ast.parse(source)
    imported: dict[str, ClassPlace] = {}
    # imports within functions and classes are not those of bases
    statements = [item for item in tree.body if not isinstance(item, ast.ClassDef | ast.FunctionDef)]
    for node in itertools.chain.from_iterable(map(ast.walk, statements)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
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


def _declared(node: ast.ClassDef, module: str, imported: Mapping[str, ClassPlace]) -> ClassDeclaration:
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]  # Generic[T]
    names = [base.id for base in bases if isinstance(base, ast.Name)]
    statements = [item for item in node.body if isinstance(item, ast.Assign | ast.AnnAssign)]
    assigned = {
        ast.unparse(target): getattr(item.value, "value", None)
        for item in statements
        for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
    }
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    is_open = {item.name: "abstractmethod" in map(ast.unparse, item.decorator_list) for item in methods}
    return ClassDeclaration(
        module=module,
        name=node.name,
        documentation=ast.get_docstring(node) or "",
        bases=tuple(imported.get(name, (module, name)) for name in names),
        is_open=dict.fromkeys(assigned, False) | is_open,
        texts={name: value for name, value in assigned.items() if isinstance(value, str)},
        fields={
            ast.unparse(item.target): ast.unparse(item.annotation)
            for item in statements
            if isinstance(item, ast.AnnAssign)
        },
        imported=imported,
    )


def ancestry(place: ClassPlace) -> list[ClassDeclaration]:
    """A class, and those above it whose source is there, the nearest first."""
    declared = class_declarations(place[0]).get(place[1])
    if declared is None:
        return []
    above = [ancestor for base in declared.bases for ancestor in ancestry(base)]
    return [declared, *(ancestor for k, ancestor in enumerate(above) if ancestor not in above[k + 1 :])]


_INSTALLED = ("site-packages", "dist-packages")
_OURS = __name__.partition(".")[0]
_T = TypeVar("_T")


def is_file_class(name: str) -> bool:
    """Whether a name is that of a class in a file, ``FILE.py:Class``."""
    return ".py:" in name


def class_in_file(name: str, family: type[_T]) -> type[_T]:
    """The class that ``FILE.py:Class`` names; the file runs once in a process.

    Raises:
        ConfigError: the file or class does not exist, or is not of the family, or a folder from elsewhere
            names it and may not.
    """
    path, _, attribute = name.rpartition(":")
    file = Path(path).resolve()
    module = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    require_own_code(module, attribute)
    spec = spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    try:
        if module not in sys.modules:
            sys.modules[module] = module_from_spec(spec)  # pydantic looks there for the names of types
            spec.loader.exec_module(sys.modules[module])
        found_class = getattr(sys.modules[module], attribute)
    except (OSError, ImportError, SyntaxError, AttributeError) as error:
        sys.modules.pop(module, None)
        raise ConfigError(f"cannot read '{name}': {error}; give FILE.py:Class") from error
    if not (isinstance(found_class, type) and issubclass(found_class, family)):
        raise ConfigError(f"'{name}' is not a subclass of {family.__module__}.{family.__qualname__}")
    return found_class


def own_code(settings: BaseModel) -> dict[str, dict[str, str]]:
    """``own_code``: module -> digest of its source, of all components from outside polyfed among the settings and
    beneath them, and of what their modules import from the same package or folder. Empty where there are none."""
    digests: dict[str, str] = {}
    for part_class in {type(part) for part in _parts(settings)}:
        if part_class.__module__.partition(".")[0] != _OURS:
            digests |= _sources(part_class.__module__)
    return {"own_code": digests} if digests else {}


def _parts(value: Any) -> Iterator[BaseModel]:
    from pydantic import BaseModel  # takes a tenth of a second, which names of components do without

    if isinstance(value, BaseModel):
        yield value
        value = dict(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)


def _sources(module: str) -> dict[str, str]:
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return {}  # a notebook's cell has none
    path = Path(file).resolve()
    root = path.parents[module.count(".") + (path.stem == "__init__")]
    digests: dict[str, str] = {}
    due = [module]
    while due:
        name = due.pop()
        source = _file_of(name, root)
        if (
            source is None
            or name in digests
            or (root.name in _INSTALLED and name.split(".")[0] != module.split(".")[0])
        ):
            continue
        content = source.read_bytes()
        digests[name] = hashlib.sha256(content).hexdigest()
        due += [
            name.rpartition(".")[0],
            *_imported(content, name if source.stem == "__init__" else name.rpartition(".")[0]),
        ]
    return digests or {path.stem: hashlib.sha256(path.read_bytes()).hexdigest()}  # of a class in a file


def _file_of(name: str, root: Path) -> Path | None:
    place = root.joinpath(*name.split("."))
    files = (place / "__init__.py", place.with_suffix(".py")) if name else ()
    return next((file for file in files if file.is_file()), None)


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Names of modules that a module of a package may import; some are names in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parts, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
