"""Study files as YAML, of polyfed and of a user, with what they extend; nothing is validated here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.removed import removed
from polyfed.core.untrusted import yaml_content
from polyfed.runs.config_files import merged
from polyfed.runs.presets import parsed

SUFFIX = ".yaml"


def setting_label(value: JsonValue) -> str:
    """A value of a setting as a label: 0.1 and 5 are ``0.1`` and ``5``."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def merged_study(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A study with the keys of another on top; null takes a row, column or axis away, with what is printed of it, or a
    kind of settings that is tuned."""
    result = merged(base, over)
    rows, columns = (_null_names(result.get(key)) for key in ("rows", "columns"))
    if isinstance(printed := result.get("printed"), Mapping):
        result["printed"] = {row: _without(items, columns) for row, items in _without(printed, rows).items()}
    for key in {"rows", "columns", "axes", "printed"} & result.keys():
        result[key] = _without(result[key], _null_names(result[key]))
    if isinstance(tuning := result.get("tuning"), Mapping) and (kinds := tuning.get("settings")):
        result["tuning"] = {**tuning, "settings": _without(kinds, _null_names(kinds))}
    return result


def _null_names(section: Any) -> list[str]:
    return [name for name, item in section.items() if item is None] if isinstance(section, Mapping) else []


def _without(section: Any, names: Sequence[str]) -> Any:
    if not isinstance(section, Mapping):
        return section  # which validation refuses
    return {name: item for name, item in section.items() if name not in names}


def _with_text_keys(content: Any) -> Any:
    """YAML reads 0.1 and 5 as numbers where they are labels of an axis."""
    if isinstance(content, Mapping):
        return {setting_label(key): _with_text_keys(value) for key, value in content.items()}
    return [_with_text_keys(item) for item in content] if isinstance(content, list) else content


def study_content(source: str | Path, extending: tuple[str, ...] = ()) -> dict[str, Any]:
    """The mapping of a study file with what it ``extends`` beneath.

    Raises:
        ConfigError: no such study or file, not YAML, or it extends itself.
    """
    path, own = Path(source), study_files()
    if str(source) in extending:
        raise ConfigError(f"study '{source}' extends itself: {' -> '.join((*extending, str(source)))}")
    if str(source) in own:
        content = parsed(own[str(source)].read_text(encoding="utf-8"))
    elif path.suffix in (SUFFIX, ".yml") or path.is_file():
        content = _read(path)
    else:
        gone = removed("study", str(source))
        raise ConfigError(f"study {gone}" if gone else f"no study or file '{source}'; {nearest(str(source), own)}")
    if not isinstance(content, dict):
        raise ConfigError(f"study '{source}' must be a mapping of settings, not {type(content).__name__}")
    content = _with_text_keys(content)
    base = content.pop("extends", None)
    if base is None:
        return dict(content)
    beside = path.parent / f"{base}{SUFFIX}"
    base = beside if path.is_file() and beside.is_file() else str(base)
    return merged_study(study_content(base, (*extending, str(source))), content)


def _read(path: Path) -> Any:
    try:
        return yaml_content(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read study '{path}': {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"'{path}' is not YAML: {error}") from error


def study_files() -> dict[str, Traversable]:
    """Name -> file of the studies that come with polyfed; those of papers begin with ``papers/``."""
    home = resources.files("polyfed.lab.studies")
    folders = {"": home, "papers/": home / "papers"}
    files = {
        f"{prefix}{file.name.removesuffix(SUFFIX)}": file
        for prefix, folder in folders.items()
        for file in folder.iterdir()
        if file.name.endswith(SUFFIX)
    }
    return dict(sorted(files.items()))


def folder_name(name: str, scale: str) -> str:
    return f"{name.replace('/', '-')}-{scale}"


def require_known(key: str, names: Any, valid: Any) -> None:
    """Raise ValueError if one of the names is not valid."""
    known = list(valid)
    for name in names:
        if name not in known:
            raise ValueError(f"{key}: there is no '{name}'; {nearest(str(name), known)}")
