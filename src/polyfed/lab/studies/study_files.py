"""Study files as YAML, with what they extend; nothing is validated here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from polyfed.core.declarations import is_file_class
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.untrusted import yaml_content
from polyfed.runs.config_files import merged

SUFFIX = ".yaml"
REPOSITORY = "polyfed's repository"


def setting_label(value: JsonValue) -> str:
    """A value of a setting as a label: 0.1 and 5 are ``0.1`` and ``5``."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def merged_study(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A study with the keys of another on top; null removes a row, column or axis with its printed values, or a kind of
    tuned settings. A main table replaces a search, and a search replaces a main table."""
    result = merged(base, over)
    for below, under, on_top in [(result, base, over), *_scales(result, base, over)]:
        before, after = (of.get("tuning") or {} for of in (under, on_top))
        if after.get("table") or (before.get("table") and "settings" in after):
            below["tuning"] = dict(after)
    rows, columns = (_null_names(result.get(key)) for key in ("rows", "columns"))
    if isinstance(printed := result.get("printed"), Mapping):
        result["printed"] = {row: _without(items, columns) for row, items in _without(printed, rows).items()}
    for key in {"rows", "columns", "axes", "printed"} & result.keys():
        result[key] = _without(result[key], _null_names(result[key]))
    if isinstance(tuning := result.get("tuning"), Mapping) and (kinds := tuning.get("settings")):
        result["tuning"] = {**tuning, "settings": _without(kinds, _null_names(kinds))}
    return result


def _scales(*studies: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Each common scale, as a tuple of its sections."""
    scales = [study.get("scales") or {} for study in studies]
    shared = [name for name in scales[0] if all(isinstance(own.get(name), Mapping) for own in scales)]
    return [tuple(own[name] for own in scales) for name in shared]


def _null_names(section: Any) -> list[str]:
    return [name for name, item in section.items() if item is None] if isinstance(section, Mapping) else []


def _without(section: Any, names: Sequence[str]) -> Any:
    if not isinstance(section, Mapping):
        return section  # which validation refuses
    return {name: item for name, item in section.items() if name not in names}


def _as_written(content: Any, folder: Path) -> Any:
    """Content with labels as texts, where YAML reads numbers, and paths of files next to the study."""
    if isinstance(content, list):
        return [_as_written(item, folder) for item in content]
    if not isinstance(content, Mapping):
        return content
    result = {setting_label(key): _as_written(value, folder) for key, value in content.items()}
    analysis, table = result.get("analysis"), result.get("table")
    if isinstance(analysis, str) and is_file_class(analysis):
        result["analysis"] = os.path.normpath(folder / analysis)
    for key in ("base", "suite"):
        if isinstance(name := result.get(key), str) and (folder / name).is_file():
            result[key] = str(folder / name)
    if isinstance(table, str) and (file := folder / f"{table.removesuffix(SUFFIX)}{SUFFIX}").is_file():
        result["table"] = str(file)
    return result


def _without_matrices(section: Mapping[str, Any]) -> dict[str, Any]:
    """A study, or a section of one, with each matrix of rows or columns (with ``each``) expanded."""
    result = dict(section)
    for key in {"columns", "rows", "scales"} & result.keys():
        if isinstance(result[key], Mapping):
            result[key] = {
                name: _without_matrices(item) if isinstance(item, Mapping) else item
                for form, own in result[key].items()
                for name, item in _expanded(form, own)
            }
    return result


def _expanded(form: str, section: Any) -> Iterator[tuple[str, Any]]:
    """A row or column by name; for a matrix one per combination, the last axis fastest.

    ``{client}`` is a label of the axis ``client`` of ``each`` in the name, and its value in settings.
    """
    if not isinstance(section, Mapping) or "each" not in section:
        yield form, section
        return
    given = section["each"].items()
    axes = {axis: own if isinstance(own, Mapping) else {str(one): one for one in own} for axis, own in given}
    settings = {key: value for key, value in section.items() if key != "each"}
    if lacking := [axis for axis in axes if f"{{{axis}}}" not in form]:
        raise ConfigError(f"'{form}': each.{lacking[0]}: the name is not unique; write {{{lacking[0]}}} into it")
    for labels in product(*axes.values()):
        values = [axes[axis][label] for axis, label in zip(axes, labels, strict=True)]
        yield _filled(form, axes, labels), _filled(settings, axes, values)


def _filled(value: Any, axes: Iterable[str], texts: Sequence[Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(item, axes, texts) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    for axis, text in zip(axes, texts, strict=True):
        if value == f"{{{axis}}}":
            return text  # a number stays one
        value = value.replace(f"{{{axis}}}", str(text))
    return value


def study_content(source: str | Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping of a study file on top of the file that it ``extends``, a path relative to it.

    Raises:
        ConfigError: The file is missing, not YAML, or extends itself.
    """
    path = Path(source)
    if path.resolve() in extending:
        raise ConfigError(f"study '{source}' extends itself: {' -> '.join(file.name for file in (*extending, path))}")
    if path.suffix not in (SUFFIX, ".yml") and not path.is_file():
        raise ConfigError(_missing(str(source)))
    content = _read(path)
    if not isinstance(content, dict):
        raise ConfigError(f"study '{source}' must be a mapping of settings, not {type(content).__name__}")
    content = _without_matrices(_as_written(content, path.parent))
    if (base := content.pop("extends", None)) is None:
        return dict(content)
    named = path.parent / str(base)
    beside = next((file for file in (named, named.with_name(f"{named.name}{SUFFIX}")) if file.is_file()), None)
    if beside is None:
        raise ConfigError(f"{path}: extends: {_missing(str(base))}")
    return merged_study(study_content(beside, (*extending, path.resolve())), content)


def _missing(name: str) -> str:
    return f"no study file '{name}'; studies of papers are files in {REPOSITORY}, such as papers/creamfl/t1.yaml"


def _read(path: Path) -> Any:
    try:
        return yaml_content(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read study '{path}': {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"'{path}' is not YAML: {error}") from error


def study_files(folder: Path) -> dict[str, Path]:
    """Path below a folder without ending (``creamfl/t1``) -> file of each study.

    Raises:
        ConfigError: The folder is missing, or a file in it is not YAML.
    """
    if not folder.is_dir():
        raise ConfigError(f"no folder '{folder}'; paper studies are in {REPOSITORY}: polyfed study list CLONE/papers")
    files = {file: study_content(file) for file in sorted(folder.rglob(f"*{SUFFIX}")) if isinstance(_read(file), dict)}
    studies = [file for file, content in files.items() if {"title", "rows", "columns"} <= content.keys()]
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in studies}


def study_name(path: Path) -> str:
    """Name of its results: that of the file, behind its folder's unless it lies in the working directory."""
    return path.stem if path.resolve().parent == Path.cwd() else f"{path.resolve().parent.name}-{path.stem}"


def require_known(key: str, names: Any, valid: Any) -> None:
    """Raise ValueError if one of the names is not valid."""
    known = list(valid)
    for name in names:
        if name not in known:
            raise ValueError(f"{key}: unknown '{name}'; {nearest(str(name), known)}")
