"""The JSON schema of an experiment's YAML file, by which editors complete and check what is written."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from polyfed.core.settings import Settings, is_component
from polyfed.data.images import Augmentation
from polyfed.federation.settings import GroupSettings
from polyfed.runs.experiment import Experiment

_DEFS = "#/$defs/{model}"
_PATH = {"type": "string", "pattern": r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$", "description": "import path of a class"}


def experiment_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of experiments, with all components that are installed.

    Nothing is required, as a file may extend another; a component's settings are checked where its ``name`` stands.
    """
    members = _members()
    kinds = [kind for components in members.values() for kind in components.values()]
    inputs = [(kind, "validation") for kind in dict.fromkeys([Experiment, *kinds])]
    by_kind, whole = models_json_schema(inputs, ref_template=_DEFS, schema_generator=_WithFamilies)  # type: ignore[arg-type]
    definitions: dict[str, Any] = _without_required(whole["$defs"])
    names = {kind: reference["$ref"].rpartition("/")[2] for (kind, _), reference in by_kind.items()}
    for family, components in members.items():
        content = {name: names[kind] for name, kind in components.items()}
        for key in content.values():
            definitions[key].setdefault("properties", {})["name"] = True  # which of them it is, the family says
        definitions[_key(family)] = _choice(content)
    content = definitions.pop(names[Experiment])
    content["properties"]["extends"] = {"type": "string", "description": "preset, or path of a file, to start from"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "polyfed experiment",
        **content,
        "$defs": definitions,
    }


class _WithFamilies(GenerateJsonSchema):
    """Refers to the family where any of its components may stand."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        kind = schema["cls"]
        if is_component(kind) and kind.family() is kind:
            return {"$ref": _DEFS.format(model=_key(kind))}
        content = super().model_schema(schema)
        if issubclass(kind, GroupSettings):  # ``model`` is short for a list of one
            content["properties"]["model"] = content["properties"]["models"]["items"]
        return {"anyOf": [{"type": ["boolean", "number"]}, content]} if issubclass(kind, Augmentation) else content


def _members() -> dict[type[Settings], dict[str, type[Settings]]]:
    """Family -> name -> component, of all families that experiments choose from and whose packages are there."""
    families: dict[type[Settings], dict[str, type[Settings]]] = {}
    pending: list[type[Any]] = [Experiment]
    seen: set[type[Any]] = set()
    while pending:
        kind = pending.pop()
        if kind in seen:
            continue
        seen.add(kind)
        if is_component(kind) and kind.family() is kind:
            families[kind] = _installed(kind)
            pending += families[kind].values()
        pending += [below for info in kind.model_fields.values() for below in _models_in(info.annotation)]
    return families


def _installed(family: type[Settings]) -> dict[str, type[Settings]]:
    members = {}
    for name in family.declared():
        try:
            members[name] = family.named(name)
        except ValueError:  # needs a package that is not there
            continue
    return members


def _models_in(annotation: Any) -> list[type[Any]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for part in getattr(annotation, "__args__", ()) for kind in _models_in(part)]


def _key(family: type[Settings]) -> str:
    return f"{family.__name__}Choice"


def _choice(content: dict[str, str]) -> dict[str, Any]:
    """A name alone, an import path, or a mapping whose name says what else may stand in it."""
    rules = [
        {
            "if": {"type": "object", "properties": {"name": {"const": name}}, "required": ["name"]},
            "then": {"$ref": _DEFS.format(model=key)},
        }
        for name, key in content.items()
    ]
    by_name = {"anyOf": [{"enum": list(content)}, _PATH]}
    choice = {"anyOf": [*by_name["anyOf"], {"type": "object", "properties": {"name": by_name}}]}
    return choice | ({"allOf": rules} if rules else {})


def _without_required(content: Any) -> Any:
    if isinstance(content, dict):
        return {
            key: _without_required(value)
            for key, value in content.items()
            if not (key == "required" and isinstance(value, list))
        }
    return [_without_required(value) for value in content] if isinstance(content, list) else content
