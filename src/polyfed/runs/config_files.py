"""Configurations as files: presets and YAML files, and what they extend; nothing is validated here."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial, reduce
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.moved import moved_path, with_moved
from polyfed.core.untrusted import yaml_content

COST = "cost"
"""A key of presets alone: what a run takes, for people who choose one."""

START = ".start"
"""File of a run folder with the start of its configuration's paths on this machine; not to be handed over."""

FAMILY = "family"
"""A key of presets alone: under which preset it is listed, where that is not the one that it extends."""


def read_config(source: str | Path) -> dict[str, Any]:
    """The mapping of a preset or YAML file, with what it ``extends`` merged in (its own keys win).

    Raises:
        ConfigError: no such preset or file, not YAML, or it extends itself.
    """
    return reduce(merged, read_layers(source))


def read_layers(source: str | Path, extending: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The mapping of a preset or YAML file, after those of what it ``extends``, the innermost first.

    Args:
        source: name of a preset, or path of a file.
        extending: the files and presets on the way here, each of which extends the next.

    Raises:
        ConfigError: no such preset or file, not YAML, or it extends itself.
    """
    path = Path(source)
    way = (*extending, str(path.resolve() if path.is_file() else source))
    if way[-1] in extending:
        raise ConfigError(f"'{extending[0]}' extends itself: {' -> '.join(way)}; take one 'extends' out")
    if path.suffix in (".yaml", ".yml") or path.is_file():
        content = _parse_yaml(_read(path), str(source))
    elif str(source) in _texts():
        content = dict(parsed(preset_text(str(source))))  # our own: read fast
    else:
        # likely intended: a file of that name, or the preset of nearly that name; not all presets, which are many
        files = [file for file in (f"{source}.yaml", f"{source}.yml") if Path(file).is_file()]
        close = [f"did you mean '{name}'? " for name in difflib.get_close_matches(str(source), preset_names(), n=1)]
        hint = f"{''.join(close)}polyfed list presets shows all; a file of your own ends in .yaml"
        hint = f"did you mean the file '{files[0]}'?" if files else hint
        raise ConfigError(f"no preset or file '{source}'; {hint}")
    return layers_of(content, path.parent, way)


def layers_of(content: Mapping[str, Any], folder: Path, extending: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """A mapping after those of what it ``extends``: a preset, or a file by its path from ``folder``."""
    own = {key: value for key, value in with_moved(content).items() if key not in (COST, FAMILY)}
    base = own.pop("extends", None)
    if base is None:
        return [own]
    beside = folder / str(base)
    return [*read_layers(beside if beside.is_file() else str(base), extending), own]


def resolved_config(path: Path) -> dict[str, Any]:
    """The mapping of a run's own configuration, which extends nothing: a run is what its folder holds.

    Raises:
        ConfigError: it cannot be read, is not YAML, or extends another.
    """
    content = _parse_yaml(_read(path), str(path))
    if "extends" in content:  # of who handed the run over, it would name a file here
        raise ConfigError(f"'{path}': unknown key 'extends' of a run; take it out")
    return with_moved(content, warns=False)  # the run of an older version is what it was


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the keys of ``over``, recursively; a component of another name replaces the whole component."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        # settings of one optimiser mean nothing to another: components of different names do not mix
        if isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("name") in (None, old.get("name")):
            result[key] = merged(old, value)
        else:
            result[key] = value
    return result


Replaced = dict[str, dict[str, Any]]
"""Path of a component that an override puts in the place of another -> settings of that one that it has not."""


def override_in(text: str) -> tuple[str, Any]:
    """Path and value of a ``path.to.key=value`` override.

    Raises:
        ConfigError: it is not of that form.
    """
    path, sign, value = text.partition("=")
    if not sign or not path:
        raise ConfigError(f"--set {text}: needs the form KEY=VALUE")
    with contextlib.suppress(ValueError):  # "a: b: c" is not YAML; the setting's type decides about texts
        return moved_path(path), yaml_content(value)
    return moved_path(path), value


def overridden(content: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[str], Replaced]:
    """A configuration with ``path.to.key=value`` overrides, the paths that they set, and what that took away.

    Raises:
        ConfigError: an override is not of that form, or below a value.
    """
    named, replaced = list[str](), Replaced()
    for path, value in map(override_in, overrides):
        named.append(path)
        keys = named[-1].split(".")
        place = keys[:-1] if len(keys) > 1 and keys[-1] == "name" else keys
        old, content = value_at(content, place), with_value(content, keys, value, named[-1])
        new = value_at(content, place)
        kept = new if isinstance(new, Mapping) else {"name": new}
        if isinstance(old, Mapping) and "name" in old and (left := {key: old[key] for key in old if key not in kept}):
            replaced[".".join(place)] = {**replaced.get(".".join(place), {}), **left}
    return content, named, replaced


def value_at(content: Any, keys: Sequence[str], absent: Any = None) -> Any:
    """Value at the keys of a configuration; ``absent`` if there is none."""
    for key in keys:
        section = {str(k): item for k, item in enumerate(content)} if isinstance(content, list) else content
        content = section.get(key, absent) if isinstance(section, Mapping) else absent
    return content


def with_value(content: Any, keys: Sequence[str], value: Any, path: str) -> Any:
    """The content of a configuration with a value at the keys; ``path`` is what an error calls them."""
    if not keys:
        return value
    key, below = keys[0], keys[1:]
    if isinstance(content, list) and key.isdigit() and int(key) < len(content):
        position = int(key)
        return [*content[:position], with_value(content[position], below, value, path), *content[position + 1 :]]
    # a component may be its bare name
    section = {"name": content} if isinstance(content, str) else {} if content is None else content
    if not isinstance(section, Mapping):
        raise ConfigError(f"--set {path}: '{key}' is below a value, not a section")
    if path != "name" and list(keys) == ["name"] and section.get("name") != value:
        section = {}  # another component: settings of the old one do not apply
    return {**section, key: with_value(section.get(key), below, value, path)}


def config_text(content: Mapping[str, Any]) -> str:
    """A configuration as YAML."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the same text, three times faster
    return yaml.dump(content, Dumper=dumper, sort_keys=False, allow_unicode=True)


def start_of(folder: Path) -> Path | None:
    """Where the paths of a run's configuration start; None: in the working folder, as it was handed over or moved.

    Raises:
        ConfigError: its note of it cannot be read.
    """
    note = folder / START
    start = (folder.resolve() / _read(note).rstrip("\n")).resolve() if note.is_file() else None
    return start if start is not None and start.is_dir() else None


def way_from(folder: Path, start: Path) -> Path:
    """The way from a run folder to where its paths start, which names nothing of the machine where the run is below."""
    return Path(os.path.relpath(start, folder)) if folder.is_relative_to(start) else start


def with_paths(content: Any, change: Callable[[Path], Path]) -> Any:
    """The content of a configuration with each absolute path in it changed."""
    if isinstance(content, Mapping):
        return {key: with_paths(value, change) for key, value in content.items()}
    if isinstance(content, list):
        return [with_paths(value, change) for value in content]
    is_path = isinstance(content, str) and "\n" not in content and Path(content).is_absolute()
    return str(change(Path(content))) if is_path else content


def portable_content(content: dict[str, Any], folder: Path, data_folder: Path | None) -> dict[str, Any]:
    """A configuration whose paths below a folder are relative, and mean the same in it.

    Args:
        content: Content of the configuration.
        folder: where they start; of the root, below which everything is, none does.
        data_folder: to which paths of sources are relative; None: there is none yet, and it becomes ``folder``.
    """

    def relative(path: Path, to: Path = folder) -> Path:
        inside = path.is_relative_to(folder) and to.is_relative_to(folder) and folder != Path(folder.anchor)
        return Path(os.path.relpath(path, to)) if inside else path

    base = folder if data_folder is None else folder / data_folder
    sources = with_paths(content["data"]["sources"], partial(relative, to=base))
    data = with_paths(content["data"], relative) | {"sources": sources}
    if data_folder is None and sources != content["data"]["sources"]:
        data["dir"] = "."
    return {**with_paths(content, relative), "data": data}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read config '{path}': {error.strerror}; give a YAML file or a preset") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"'{path}' is not UTF-8 text ({error}); save it as UTF-8") from error


def _parse_yaml(text: str, where: str) -> dict[str, Any]:
    try:
        content = yaml_content(text)
    except ValueError as error:
        raise ConfigError(f"'{where}' is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"'{where}' must be a mapping of settings, not {type(content).__name__}")
    return dict(content)


BASES = "bases/"
"""Prefix of the names of bases, which presets extend and which are not run."""


def presets() -> dict[str, str]:
    """Names and descriptions of presets."""
    return {name: str(parsed(preset_text(name)).get("description", "")) for name in preset_names()}


def preset_names() -> tuple[str, ...]:
    return tuple(name for name in _texts() if not name.startswith(BASES))


def parsed(text: str) -> Any:
    """Content of a YAML text; by the parser in C where available, and once, since presets are many."""
    return deepcopy(_parsed(text))


@cache
def _parsed(text: str) -> Any:
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def preset_text(name: str) -> str:
    """A preset as YAML with its comments, for copying; or a base that several presets extend, data without a method.

    Raises:
        ConfigError: the preset does not exist.
    """
    if name not in _texts():
        raise ConfigError(f"no preset '{name}'; {nearest(name, preset_names())}")
    return _texts()[name]


@cache
def _texts() -> dict[str, str]:
    """Texts of presets and bases by name, in alphabetical order."""
    top = resources.files("polyfed.presets")
    files = {f"{folder}{file.name}": file for folder in ("", BASES) for file in top.joinpath(folder).iterdir()}
    names = {file.removesuffix(".yaml"): file for file in files if file.endswith(".yaml")}
    return {name: files[names[name]].read_text(encoding="utf-8") for name in sorted(names)}
