"""Source code of components outside polyfed: what they compute may change while their settings stay."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

_INSTALLED = ("site-packages", "dist-packages")
_OURS = __name__.partition(".")[0]


def own_code(settings: BaseModel) -> dict[str, dict[str, str]]:
    """``own_code``: module -> digest of its source, of all components from outside polyfed among the settings and
    beneath them, and of what their modules import from the same package or folder. Empty where there are none."""
    digests: dict[str, str] = {}
    for kind in {type(part) for part in _parts(settings)}:
        if kind.__module__.partition(".")[0] != _OURS:
            digests |= _sources(kind.__module__)
    return {"own_code": digests} if digests else {}


def _parts(value: Any) -> Iterator[BaseModel]:
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
    return digests


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
