"""Files that a reader needs to understand a function: the closure of what its body really uses.

    python scripts/reach.py src/polyfed algorithms/fedavg.py:FedAvg.round --apart wire core --edge federation data
    python scripts/reach.py FOLDER/fedjax algorithms/fed_avg.py:federated_averaging --edge core

The rule, which is the same for any package: from the body of the start the script goes to every function, method,
property, class and constant of the package that the body names, and on from their bodies. A file counts once something
that is reached stands in it; imports that no reached body uses do not count. Two sorts of packages are less than that:
at the ``edge`` stands what a method is written in terms of (clients, cohort, models): a file there counts, as one looks
up what a call does, but its bodies are not read on; ``apart`` is machinery that is taken for granted and not counted.
What an object is follows from the source alone:

* a parameter, field or result is of the classes that its annotation names, in containers too;
* a field whose default makes an object is of that object's class, which is how a default settles which of several
  components is meant; an abstract method without such a default counts with its declaration and leads no further;
* a name without annotation is what was assigned to it; ``self`` is the class of the start as far as its own methods go,
  so that a base's method leads to what the class has in place of others;
* classes that are made are reached with ``__init__``, ``__post_init__``; objects that are called, iterated, indexed or
  entered with the method that does it;
* annotations and decorators name classes, but nobody need read these to follow the body: they do not count.
"""

from __future__ import annotations

import argparse
import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from imports import Module, modules

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
MADE = ("__init__", "__post_init__")


@dataclass(frozen=True)
class Class:
    """A class of the package."""

    node: ast.ClassDef
    module: Module


@dataclass(frozen=True)
class Function:
    """A function or method; ``of`` is the class that its ``self`` is of."""

    node: FUNCTION
    module: Module
    of: Class | None = None


@dataclass(frozen=True)
class Value:
    """What is known of an expression: classes that it is of, or that its call gives; a module that it is."""

    classes: frozenset[Class] = frozenset()
    gives: frozenset[Class] | None = None
    module: Module | None = None

    @property
    def result(self) -> Value:
        """Of a call."""
        return Value(self.classes if self.gives is None else self.gives)


NOTHING = Value()


class Package:
    """What the names in a package mean."""

    def __init__(self, parts: Iterable[Module]) -> None:
        self.modules = {module.name: module for module in parts}
        self.names = {name: dict(_bound(module)) for name, module in self.modules.items()}
        self._attributes: dict[tuple[Class, str], frozenset[Class]] = {}

    def defined(self, module: Module, name: str, deep: int = 8) -> tuple[Module, ast.AST | None] | None:
        """Where a module's name is defined: its node there, or None with a module that the name is."""
        node = self.names[module.name].get(name)
        if not isinstance(node, ast.alias):
            return None if node is None else (module, node)
        return self.imported(self.source(module, node), node.name, deep)

    def imported(self, source: str, name: str, deep: int = 8) -> tuple[Module, ast.AST | None] | None:
        """The same for what ``from source import name`` binds; ``import source`` has no name."""
        whole = f"{source}.{name}".strip(".")
        if whole in self.modules:
            return self.modules[whole], None
        return self.defined(self.modules[source], name, deep - 1) if source in self.modules and deep else None

    def source(self, module: Module, node: ast.alias) -> str:
        """Module that an import names, written out."""
        source, level = self._sources.get(id(node), ("", 0))
        if not level:
            return source
        package = module.name.split(".") if module.path.name == "__init__.py" else module.name.split(".")[:-1]
        return ".".join([*package[: len(package) - level + 1], *filter(None, [source])])

    @property
    def _sources(self) -> dict[int, tuple[str, int]]:
        return _sources_of(tuple(self.modules.values()))

    @cache  # noqa: B019 - one package lives as long as the script
    def bases(self, known: Class) -> tuple[Class, ...]:
        """The class and what it extends, in about the order in which Python looks."""
        above = [base for node in known.node.bases for base in self.named(node, known.module)]
        return known, *dict.fromkeys(found for base in above for found in self.bases(base))

    def named(self, annotation: ast.AST | None, module: Module) -> frozenset[Class]:
        """Classes of the package that an annotation names."""
        found = set()
        for node in ast.walk(_written(annotation)) if annotation is not None else ():
            if isinstance(node, ast.Name):
                found |= self._class(self.defined(module, node.id), module)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                place = self.defined(module, node.value.id)
                if place and place[1] is None:
                    found |= self._class(self.defined(place[0], node.attr), module)
        return frozenset(found)

    def _class(self, place: tuple[Module, ast.AST | None] | None, module: Module) -> frozenset[Class]:
        if place and isinstance(place[1], ast.ClassDef):
            return frozenset({Class(place[1], place[0])})
        if place and isinstance(place[1], ast.Assign | ast.AnnAssign) and isinstance(place[1].value, ast.expr):
            aliased = place[1].value  # ``Vector = list[Part]`` names a class, ``LIMIT = Limit(3)`` makes one
            if isinstance(aliased, ast.Call):
                bounds = [keyword.value for keyword in aliased.keywords if keyword.arg == "bound"]  # of a TypeVar
                return frozenset().union(*(self.named(bound, place[0]) for bound in bounds))
            return self._alias(aliased, place[0])
        return frozenset()

    @cache  # noqa: B019
    def _alias(self, node: ast.expr, module: Module) -> frozenset[Class]:
        return self.named(node, module)

    def member(self, known: Class, name: str) -> tuple[Class, ast.AST] | None:
        """What a class has under a name, and where."""
        for base in self.bases(known):
            for node in base.node.body:
                if name in _bound_by(node):
                    return base, node
        return None

    def attribute(self, known: Class, name: str) -> frozenset[Class]:
        """Classes that ``self.name = ...`` in its methods tells of."""
        if (known, name) in self._attributes:
            return self._attributes[known, name]
        self._attributes[known, name] = found = frozenset[Class]()  # what an assignment to itself would find
        for base in self.bases(known):
            for method in base.node.body:
                if isinstance(method, FUNCTION):
                    body = Body(self, Function(method, base.module, known))
                    found |= frozenset().union(*(body.assigned(node, name) for node in ast.walk(method)))
        self._attributes[known, name] = found
        return found


@cache
def _sources_of(parts: tuple[Module, ...]) -> dict[int, tuple[str, int]]:
    places: dict[int, tuple[str, int]] = {}
    for module in parts:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom):
                places |= {id(alias): (node.module or "", node.level) for alias in node.names}
    return places


def _written(annotation: ast.AST) -> ast.AST:
    """An annotation in quotes, read."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            return ast.parse(annotation.value, mode="eval")
        except SyntaxError:
            return annotation
    return annotation


def _bound(module: Module) -> Iterator[tuple[str, ast.AST]]:
    """Names that a module binds, those of imports within functions too."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], alias) for alias in node.names)
    for node in _statements(module.tree.body):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((name, node) for name in _bound_by(node))


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
        else:
            yield node


def _bound_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef | FUNCTION):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


class Body:
    """What a function's body uses."""

    def __init__(self, package: Package, function: Function) -> None:
        self.package, self.function, self.module = package, function, function.module
        self.values: dict[str, Value] = {}
        self.used: dict[Function | Module, None] = {}
        if function.of is not None:
            self.values |= {"self": Value(frozenset({function.of})), "cls": Value(gives=frozenset({function.of}))}
        self._takes(function.node)

    def uses(self) -> Iterator[Function | Module]:
        """Functions of the package, and modules whose classes and constants it needs."""
        for statement in self.function.node.body:
            self._visit(statement)
        yield from self.used

    def assigned(self, node: ast.AST, name: str) -> frozenset[Class]:
        """Classes of what a statement sets as ``self.name``."""
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if not any(
            isinstance(at, ast.Attribute) and at.attr == name and ast.unparse(at.value) == "self" for at in targets
        ):
            return frozenset()
        if isinstance(node, ast.AnnAssign):
            return self.package.named(node.annotation, self.module)
        return self.value(node.value).classes if isinstance(node, ast.Assign) else frozenset()

    def _takes(self, node: FUNCTION | ast.Lambda) -> None:
        takes = node.args
        for one in [*takes.posonlyargs, *takes.args, *takes.kwonlyargs, takes.vararg, takes.kwarg]:
            if one is not None and one.arg not in ("self", "cls"):
                self.values[one.arg] = Value(self.package.named(one.annotation, self.module))

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, FUNCTION):
            self._takes(node)
            self.values[node.name] = Value(gives=self.package.named(node.returns, self.module))
            for statement in node.body:
                self._visit(statement)
        elif isinstance(node, ast.AnnAssign):
            self._bind(node.target, Value(self.package.named(node.annotation, self.module)))
            if node.value is not None:
                self.value(node.value)
        elif isinstance(node, ast.expr):
            self.value(node)
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            self._binds(node)
            for child in ast.iter_child_nodes(node):
                self._visit(child)

    def _binds(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, self.value(node.value))
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._bind(node.target, self._by_method(self.value(node.iter), "__iter__"))
        elif isinstance(node, ast.withitem):
            entered = self._by_method(self.value(node.context_expr), "__enter__")
            self._by_method(self.value(node.context_expr), "__exit__")
            if node.optional_vars is not None:
                self._bind(node.optional_vars, entered)

    def _bind(self, target: ast.expr, value: Value) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.values[node.id] = value

    def value(self, node: ast.expr) -> Value:
        """What an expression is; all that it names is used."""
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(self.value(node.value), node.attr)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            self.value(node.slice)
            return self._by_method(self.value(node.value), "__getitem__")
        if isinstance(node, ast.NamedExpr):
            self._bind(node.target, value := self.value(node.value))
            return value
        if isinstance(node, ast.Lambda):
            self._takes(node)
            return Value(gives=self.value(node.body).classes)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.comprehension):
                self._visit(child)
        parts = [self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return Value(frozenset().union(*(part.classes for part in parts)))

    def _call(self, node: ast.Call) -> Value:
        called = self.value(node.func)
        arguments = [self.value(value) for value in [*node.args, *(keyword.value for keyword in node.keywords)]]
        if isinstance(node.func, ast.Name) and node.func.id == "super" and self.function.of is not None:
            return Value(frozenset(self._above()))
        if called.gives is None and called.classes and not isinstance(node.func, ast.Attribute):
            return self._by_method(called, "__call__")
        if called == NOTHING and isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id):
            return Value(frozenset().union(*(argument.classes for argument in arguments)))  # zip, sorted, next
        return called.result

    def _above(self) -> Iterator[Class]:
        of, name = self.function.of, self.function.node.name
        for base in self.package.bases(of) if of else ():
            if not any(self.function.node in ast.walk(node) for node in base.node.body) and any(
                name in _bound_by(node) for node in base.node.body
            ):
                yield base
                return

    def _by_method(self, value: Value, name: str) -> Value:
        known = [one for one in value.classes if self.package.member(one, name)]
        return self._attribute(Value(frozenset(known)), name).result if known else Value(value.classes)

    def _name(self, name: str) -> Value:
        if name in self.values:
            return self.values[name]
        place = self.package.defined(self.module, name)
        return NOTHING if place is None else self._placed(*place)

    def _placed(self, module: Module, node: ast.AST | None) -> Value:
        if node is None:
            return Value(module=module)
        if isinstance(node, FUNCTION):
            self.used[Function(node, module)] = None
            return Value(gives=self.package.named(node.returns, module))
        if isinstance(node, ast.ClassDef):
            made = Class(node, module)
            self.used[module] = None
            for name in MADE:
                self._member(made, name)
            return Value(gives=frozenset({made}))
        self.used[module] = None
        annotation = node.annotation if isinstance(node, ast.AnnAssign) else getattr(node, "value", None)
        return Value(self.package.named(annotation, module))

    def _attribute(self, value: Value, name: str) -> Value:
        if value.module is not None:
            place = self.package.imported(value.module.name, name)
            return NOTHING if place is None else self._placed(*place)
        results = [self._member(one, name) for one in {*value.classes, *(value.gives or ())}]
        results = [one for one in results if one is not None]
        if not results:
            return Value(value.classes)  # ``.items()``, ``.values()``, ``.get(...)`` give what a container holds
        gives = [one.gives for one in results if one.gives is not None]
        return Value(frozenset().union(*(one.classes for one in results)), frozenset().union(*gives) if gives else None)

    def _member(self, known: Class, name: str) -> Value | None:
        found = self.package.member(known, name)
        if found is None:
            return Value(classes) if (classes := self.package.attribute(known, name)) else None
        base, node = found
        if not isinstance(node, FUNCTION):
            self.used[base.module] = None
            return Value(self._field(node, base.module))
        self.used[Function(node, base.module, known)] = None
        classes = self.package.named(node.returns, base.module)
        if node.returns is not None and "Self" in ast.unparse(node.returns):
            classes |= {known}
        if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
            return Value(classes)
        return Value(gives=classes)

    def _field(self, node: ast.AST, module: Module) -> frozenset[Class]:
        default = getattr(node, "value", None)
        made = [part.func for part in ast.walk(default) if isinstance(part, ast.Call)] if default is not None else []
        chosen = frozenset[Class]().union(*(self.package.named(part, module) for part in made))
        self.used |= {one.module: None for one in chosen}
        return chosen or self.package.named(getattr(node, "annotation", None), module)


@dataclass
class Reach:
    """The closure of some starts.

    Attributes:
        package: where names are looked up.
        apart: packages and modules below the root that do not count.
        edge: those whose files count and whose bodies are not read.
        functions: those reached, by path.
    """

    package: Package
    apart: tuple[str, ...] = ()
    edge: tuple[str, ...] = ()
    functions: dict[Path, set[str]] = field(default_factory=dict)

    def start(self, place: str) -> None:
        """Go through the closure of ``path/below/the/root.py:Class.method`` or ``...py:function``."""
        path, _, name = place.partition(":")
        module = next(one for one in self.package.modules.values() if one.path.as_posix().endswith(f"/{path}"))
        self._all(self._found(module, name))

    def _found(self, module: Module, name: str) -> Function:
        first, _, method = name.partition(".")
        node = self.package.names[module.name][first]
        if isinstance(node, FUNCTION):
            return Function(node, module)
        if isinstance(node, ast.ClassDef):
            found = self.package.member(known := Class(node, module), method)
            if found is not None and isinstance(found[1], FUNCTION):
                return Function(found[1], found[0].module, known)
        raise SystemExit(f"{module.path} has no function '{name}'")

    def _all(self, first: Function) -> None:
        waiting, seen = [first], {first}
        while waiting:
            function = waiting.pop()
            self._counts(function.module).add(function.node.name)
            within = not _is_below(function.module, self.edge) or function is first
            for used in Body(self.package, function).uses() if within else ():
                module = used if isinstance(used, Module) else used.module
                if _is_below(module, self.apart):
                    continue
                self._counts(module)
                if isinstance(used, Function) and used not in seen:
                    seen.add(used)
                    waiting.append(used)

    def _counts(self, module: Module) -> set[str]:
        return self.functions.setdefault(module.path, set())


def _is_below(module: Module, packages: tuple[str, ...]) -> bool:
    below = module.name.partition(".")[2]
    return any(below == name or below.startswith(f"{name}.") for name in packages)


def main() -> None:
    """Print the files of some starts together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("starts", nargs="+", help="path/in/package.py:Class.method or path.py:function")
    parser.add_argument("--apart", nargs="*", default=[], help="packages that do not count")
    parser.add_argument("--edge", nargs="*", default=[], help="packages that count and are not read on")
    options = parser.parse_args()
    reach = Reach(Package(modules(options.root)), tuple(options.apart), tuple(options.edge))
    for place in options.starts:
        reach.start(place)
    lines = 0
    for path, names in sorted(reach.functions.items()):
        lines += (here := len(path.read_text().splitlines()))
        print(f"{path} ({here}): {', '.join(sorted(names)) or 'names only'}")
    print(f"{len(reach.functions)} files with {lines:,} lines")


if __name__ == "__main__":
    main()
