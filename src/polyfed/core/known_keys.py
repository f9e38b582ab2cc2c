"""Keys of a configuration against the source of the classes that read it: a mistyped one is reported at once.

Those classes need torch, whose import takes seconds. They check all that is checked here again, in the same words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyfed.core.declarations import ClassDeclaration, ClassPlace, ancestry, components, declared_component
from polyfed.core.errors import ConfigError, unknown

SHORT_FORM = "short_form"
"""Class attribute of settings: a key that they take in place of one of their fields."""


def require_known_keys(content: Mapping[str, Any], settings_class: ClassPlace) -> None:
    """Check the keys of a configuration, and the names of components; code from elsewhere is not looked at.

    Args:
        content: Content of the configuration.
        settings_class: the class of settings that reads it.

    Raises:
        ConfigError: naming the first unknown one and what would be valid.
    """
    for problem in _problems(content, settings_class, ""):
        raise ConfigError(problem)


def _problems(value: Any, place: ClassPlace, path: str) -> Iterator[str]:
    above = ancestry(place)
    family = next((one for one in above if one.texts.get("home")), None)
    if family is not None:
        name = value if isinstance(value, str) else value.get("name") if isinstance(value, Mapping) else None
        if name is None or "." in str(name):
            return
        chosen = declared_component(family.texts["home"], str(name), place)
        if chosen is None:
            shown = f" (got {value!r})" if isinstance(value, str) else ""
            kinds = components(family.texts["home"], place)
            yield f"{path}: {unknown(family.name.removesuffix('Settings').lower(), str(name), kinds)}{shown}"
            return
        above = ancestry((chosen.module, chosen.name))
    if isinstance(value, Mapping):
        yield from _below({key: part for key, part in value.items() if family is None or key != "name"}, above, path)


def _below(content: Mapping[Any, Any], above: Sequence[ClassDeclaration], path: str) -> Iterator[str]:
    fields = {name: (one, text) for one in reversed(above) for name, text in one.fields.items()}
    fields = {name: held for name, held in fields.items() if name[0] != "_" and not held[1].startswith("ClassVar")}
    for key in content:
        if key not in fields and key not in [one.texts.get(SHORT_FORM) for one in above]:
            yield f"{path or 'config'}: {unknown('key', str(key), fields)}"
    for key, (declared, annotation) in fields.items():
        value, place = content.get(key), _settings_in(annotation, declared)
        if place is None:
            continue
        if annotation.startswith(("list[", "tuple[")):
            parts = {f".{number}": part for number, part in enumerate(value)} if isinstance(value, list) else {}
        elif annotation.startswith("dict["):
            parts = {f".{name}": part for name, part in value.items()} if isinstance(value, Mapping) else {}
        else:
            parts = {"": value}
        for way, part in parts.items():
            yield from _problems(part, place, f"{path}.{key}{way}".removeprefix("."))


def _settings_in(annotation: str, declared: ClassDeclaration) -> ClassPlace | None:
    """The class of settings that an annotation names, if it is the only one and nothing else may stand there."""
    names = re.findall(r"\w+", annotation if "|" not in annotation.removesuffix(" | None") else "")
    classes = [place for name in names if ancestry(place := declared.imported.get(name, (declared.module, name)))]
    return classes[0] if len(classes) == 1 else None
