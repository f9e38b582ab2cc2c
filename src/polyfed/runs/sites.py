"""Sites by name in an experiment's file; inside, each is a group of one client with a source of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, SerializeAsAny, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails

from polyfed.core.settings import Settings, innermost_problem
from polyfed.data.source import Source
from polyfed.federation.settings import GroupName, TaskSettings, TrainingSettings, TypeName
from polyfed.models.model import ModelSettings
from polyfed.runs.config_files import merged
from polyfed.tasks.task import Task


class CommonSettings(Settings):
    """Settings of each of ``sites`` unless its own entry overrides them; the server's task, model and training too."""

    data: dict[str, Any] = Field(
        default_factory=dict, description="settings of a source: name, columns, targets, fractions, reading"
    )
    task: Any = Field(default=None, description="a task, or a list of several")
    model: dict[str, Any] = Field(
        default_factory=dict, description="as in `model`; a site has the encoders of its data's modalities"
    )
    training: dict[str, Any] = Field(default_factory=dict, description="as in `training`")


class NamedSite(CommonSettings):
    """An institution that takes part as one client: its data, and what differs from ``common``.

    A key of ``data`` replaces that of ``common.data``; ``task``, ``model`` and ``training`` merge with those of
    ``common``, but a component of another name replaces a component.
    """

    type: TypeName = ""


_SITES = TypeAdapter(dict[GroupName, NamedSite])
_PARTS: Mapping[str, TypeAdapter[Any]] = {
    "data": TypeAdapter(SerializeAsAny[Source]),
    "task": TypeAdapter(TaskSettings),
    "model": TypeAdapter(ModelSettings),
    "training": TypeAdapter(TrainingSettings),
}
_LEARNS = ("task", "model", "training")


def with_sites(content: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with ``sites`` turned into groups of one client and sources, under the names of the sites.

    Raises:
        ValueError: a key or value is wrong, with its path in ``sites`` or ``common``; a name is taken; or a site lacks
            a modality that the task needs.
    """
    below = {key: value for key, value in content.items() if key not in ("sites", "common")}
    if not content.get("sites"):
        if content.get("common"):
            raise ValueError("common holds settings of sites, and 'sites' is missing; name them, or leave it out")
        return below
    try:
        place = "sites"
        sites = _SITES.validate_python(content[place])
        place = "common"
        common = CommonSettings.model_validate(content.get(place) or {})
    except ValidationError as error:
        raise _placed((place,), error) from error
    data, groups = _section(below, "data"), _section(below, "clients")
    sources = _section(data, "sources")
    for name, site in sites.items():
        for key, there in (("clients", groups), ("data.sources", sources)):
            if name in there:
                raise ValueError(
                    f"{key}.{name}: '{name}' is a site, whose settings stand in sites.{name}, or in common; put it "
                    "there, or give one of the two another name"
                )
        sources[name], groups[name] = _of_site(name, site, common)
    below |= {"data": data | {"sources": sources}, "clients": groups}
    if isinstance(server := below.get("server"), Mapping):
        below["server"] = _server(server, common, sources)
    return below


def _section(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    section = {} if content.get(key) is None else content[key]
    if not isinstance(section, Mapping | Settings):
        raise ValueError(f"{key} is a section of settings, not {section!r}")
    return dict(section)


def _of_site(name: str, site: NamedSite, common: CommonSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the source and of the group of a site."""
    is_other = site.data.get("name", common.data.get("name")) != common.data.get("name")
    data = site.data if is_other else {**common.data, **site.data}
    columns = _valid("data", data, name, site, common).columns
    group = merged(
        _shared(common, columns, site.model),
        site.model_dump(include={*_LEARNS, "type"}, exclude_unset=True, exclude_none=True),
    )
    task: Task = _valid("task", group["task"], name, site, common)
    lacking = sorted(task.compared - columns.keys()) if columns else []
    if lacking and not site.task:
        needs = f"common.task '{task.component_name()}' needs {' and '.join(lacking)}"
        remedy = "give it a task of its own, such as task: classification, or name the columns under data.columns"
        raise _placed(("sites", name), ValueError(f"its data have {', '.join(columns)}, and {needs}; {remedy}"))
    for part in ("model", "training"):
        _valid(part, group[part], name, site, common)
    return data, {"count": 1, "source": name, **group}


def _shared(common: CommonSettings, columns: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Common task, model and training, with the encoders for the columns and those of the own model."""
    task = {"name": common.task} if isinstance(common.task, str) else common.task
    shared, encoders = dict(common.model), common.model.get("encoders")
    if columns and isinstance(encoders, Mapping):
        known = {*columns, *(model.get("encoders") or {})}
        shared["encoders"] = {modality: encoder for modality, encoder in encoders.items() if modality in known}
    return {"task": task, "model": shared, "training": common.training}


def _server(server: Mapping[str, Any], common: CommonSettings, sources: Mapping[str, Any]) -> dict[str, Any]:
    """The server's section, with common settings where it has none of its own."""
    source, model = sources.get(str(server.get("source"))), server.get("model")
    columns = source.get("columns", {}) if isinstance(source, Mapping) else {}
    shared = _shared(common, columns, model if isinstance(model, Mapping) else {})
    return merged({part: value for part, value in shared.items() if value}, server)


def _valid(part: str, value: Any, name: str, site: NamedSite, common: CommonSettings) -> Any:
    """Settings of a part of a site; an error names the place of the wrong key in the file."""
    try:
        return _PARTS[part].validate_python(value)
    except ValidationError as error:
        path, problem = innermost_problem(error)
        key = path[0] if path else getattr(problem.get("ctx", {}).get("error"), "name", "name")
        own, shared = getattr(site, part), getattr(common, part)
        is_shared = shared and (key in shared and key not in own if isinstance(own, Mapping) else not own)
        raise _placed(("common", part) if is_shared else ("sites", name, part), error) from error


def _placed(place: tuple[str, ...], error: ValueError) -> ValidationError:
    """An error at a place in the configuration."""
    details = InitErrorDetails(type="value_error", loc=place, input={}, ctx={"error": error})
    return ValidationError.from_exception_data("sites", [details])
