"""What the report needs of a run beyond its records: settings by name, environment, and the kind of each client."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import RunError
from polyfed.core.untrusted import file_json
from polyfed.runs.records import RunRecords


def setting(config: Any, *path: str) -> Any:
    for key in path:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def component(value: Any) -> str:
    """Name of a component, which a configuration gives as a name or as a section with one."""
    name = setting(value, "name") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) else ""


def recorded_environment(folder: Path) -> Mapping[str, Any]:
    """Versions, device and state of the code; empty if the run has not written them.

    Raises:
        RunError: the file is damaged.
    """
    path = folder / "environment.json"
    if not path.exists():
        return {}
    try:
        content = file_json(path.read_text("utf-8"))
    except ValueError as error:
        raise RunError(f"environment.json is damaged: {error}; restore {path} or delete it") from error
    if not isinstance(content, dict):
        raise RunError(f"environment.json holds a {type(content).__name__}, not an object; restore {path} or delete it")
    return content


def client_kinds(records: RunRecords) -> dict[str, dict[str, str]]:
    """Client id -> its ``task``, ``modalities`` and ``architecture``, as far as the configuration tells them."""
    return {
        client: _kind(setting(records.config, "clients", group), client)
        for group, clients in records.groups.items()
        for client in clients
    }


def _kind(group: Any, client: str) -> dict[str, str]:
    kind = {"task": component(setting(group, "task"))}
    models = setting(group, "models")
    number = re.search(r"-(\d+)$", client)
    if not isinstance(models, list) or not models or (number is None and len(models) > 1):
        return kind
    # the models of a group are dealt out in turn: client <group>-k has number k modulo their number
    encoders = setting(models[int(number[1]) % len(models) if number else 0], "encoders")
    if isinstance(encoders, Mapping):
        kind["modalities"] = ", ".join(map(str, encoders))
        kind["architecture"] = " + ".join(f"{component(e)} {_size(e)}".strip() for e in encoders.values())
    return kind


def _size(encoder: Any) -> str:
    widths, size, width = (setting(encoder, key) for key in ("widths", "size", "width"))
    if isinstance(widths, list) and widths:
        return "-".join(map(str, widths))
    return size if isinstance(size, str) else str(width) if isinstance(width, int) else ""
