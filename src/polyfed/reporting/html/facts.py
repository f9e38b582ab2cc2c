"""What the report needs of a run beyond its records: settings by name, environment, and the kind of each client."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.core.errors import RunError
from polyfed.core.untrusted import file_json
from polyfed.runs.records import RunRecords

_NUMBER = re.compile(r"-(\d+)$")


@dataclass(frozen=True)
class ClientKind:
    """What a client is, as far as the configuration tells; empty where it does not."""

    task: str = ""
    modalities: str = ""
    architecture: str = ""


def setting(config: Any, *path: str) -> Any:
    """A setting by its place in the tree, None where there is none."""
    for key in path:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def component(value: Any) -> str:
    """Name of a component, which a configuration gives as a name or as a section with one."""
    name = setting(value, "name") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) else ""


def planned_rounds(records: RunRecords) -> int | None:
    """Rounds that the run is to have, None if that is not known."""
    rounds = setting(records.config, "run", "rounds")
    return rounds if isinstance(rounds, int) else None


def complete_rounds(records: RunRecords) -> int:
    """Last round that is complete: its time is written last."""
    return max(records.seconds, default=records.rounds)


def environment(folder: Path) -> Mapping[str, Any]:
    """Versions, device and state of the code; empty if the run has not written them.

    Raises:
        RunError: the file is damaged.
    """
    path = folder / "environment.json"
    if not path.exists():
        return {}
    try:
        found = file_json(path.read_text("utf-8"))
    except ValueError as error:
        raise RunError(f"environment.json is damaged: {error}; restore {path} or delete it") from error
    if not isinstance(found, dict):
        raise RunError(f"environment.json holds a {type(found).__name__}, not an object; restore {path} or delete it")
    return found


def client_kinds(records: RunRecords) -> dict[str, ClientKind]:
    """Client id -> what it is: client ``<group>-k`` has the group's model k modulo their number."""
    return {
        client: _kind(setting(records.config, "clients", group), client)
        for group, clients in records.groups.items()
        for client in clients
    }


def _kind(group: Any, client: str) -> ClientKind:
    models = setting(group, "models")
    found = _NUMBER.search(client)
    if not isinstance(models, list) or not models or (found is None and len(models) > 1):
        return ClientKind(task=component(setting(group, "task")))
    model = models[int(found[1]) % len(models) if found else 0]
    encoders = setting(model, "encoders")
    known = encoders if isinstance(encoders, Mapping) else {}
    return ClientKind(
        task=component(setting(group, "task")),
        modalities=", ".join(str(name) for name in known),
        architecture=" + ".join(_encoder(encoder) for encoder in known.values()),
    )


def _encoder(encoder: Any) -> str:
    return " ".join([component(encoder), *_sizes(encoder)])


def _sizes(encoder: Any) -> Iterator[str]:
    """Widths say more than the name of a size, whose defaults they replace."""
    widths, size, width = (setting(encoder, key) for key in ("widths", "size", "width"))
    if isinstance(widths, list) and widths:
        yield "-".join(str(each) for each in widths)
    elif isinstance(size, str):
        yield size
    elif isinstance(width, int):
        yield str(width)
