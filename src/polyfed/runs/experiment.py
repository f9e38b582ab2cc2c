"""Experiments: all settings of a run, validated before any work starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polyfed.core.errors import ConfigError
from polyfed.core.files import paths_from
from polyfed.core.settings import NoEffectError, S, first_problem, innermost_problem, parse_settings
from polyfed.runs.config_files import layers_of, merged, overridden, read_layers, start_of
from polyfed.runs.preflight import require_settings
from polyfed.runs.settings import ExperimentSettings
from polyfed.runs.twins import twin_content

log = logging.getLogger(__name__)
_ABSENT = object()


class Experiment(ExperimentSettings):
    """A complete, validated description of a run; running the same description gives the same result."""

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Experiment:
        """Load a preset by name, a YAML file, or such a file's mapping, and apply ``path.to.key=value`` overrides.

        What an override, or a file, leaves without effect in what it builds on goes back to its default, and a warning
        says so; what it sets itself must have an effect. An experiment with ``twin`` becomes that twin.

        Raises:
            ConfigError: unknown preset or key, a value out of range or without effect, a file that is not YAML, an
                experiment that has no such twin, or settings that do not fit each other or the method.
            DataError: a source has no such split.
        """
        experiment = cls.read(source, overrides)
        require_settings(experiment)
        for sink in experiment.run.output.sinks:
            sink.require()
        return experiment

    @classmethod
    def read(cls, source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Experiment:
        """As ``load``, of what need not fit together yet, as it is built on or was fitted when it ran."""
        if isinstance(source, Mapping):
            return cls._read(layers_of(source, Path()), overrides)
        folder = Path(source).absolute().parent
        start = start_of(folder)  # of a run's configuration
        with paths_from(start, start or folder):
            return cls._read(read_layers(source), overrides)

    @classmethod
    def _read(cls, layers: Sequence[Mapping[str, Any]], overrides: Sequence[str]) -> Experiment:
        content, named = overridden(reduce(merged, layers, {}), overrides)
        made = content["twin"] if isinstance(content.get("twin"), Mapping) else {}
        if made.get("of") and any(name.split(".")[0] == "twin" for name in named):
            raise ConfigError(f"twin: this is a twin of '{made['of']}' already; give that experiment itself")
        experiment = _without_idle(cls, content, lambda path: _is_set(path, layers[-1], named))
        if experiment.twin is None or experiment.twin.of:
            return experiment
        return cls.parse(twin_content(experiment.model_dump(mode="json"), experiment.algorithm))

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Experiment:
        """Validate a mapping.

        Raises:
            ConfigError: naming the first wrong key, its value and what would be valid.
        """
        return parse_settings(cls, content)


def _without_idle(kind: type[S], content: dict[str, Any], is_own: Callable[[str], bool]) -> S:
    """Settings of the content without what was inherited and has no effect beside what was set on top of it."""
    # one at a time: with one back at its default, another may have an effect again
    while True:
        try:
            return kind.model_validate(content)
        except ValidationError as error:
            section, problem = innermost_problem(error)
            refusal = problem.get("ctx", {}).get("error")
            if not isinstance(refusal, NoEffectError):
                raise ConfigError(first_problem(error)) from error
            path = ".".join((*section, refusal.name))  # whose name may be a path itself
            if is_own(path):
                raise ConfigError(first_problem(error)) from error
            message = "%s: %s has no effect %s; left at its default, %s"
            log.warning(message, path, refusal.value, refusal.obstacle, refusal.default)
            content = _removed(content, path.split("."))


def _is_set(path: str, top: Mapping[str, Any], overrides: Sequence[str]) -> bool:
    """Whether a setting is set by an override or, where there are none, by the topmost file."""
    if overrides:
        return any(f"{path}.".startswith(f"{name}.") for name in overrides)
    value: Any = top
    for key in path.split("."):
        if isinstance(value, list) and key.isdigit():
            value = dict(enumerate(value)).get(int(key))
        else:
            value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
    return value is not _ABSENT


def _removed(content: Any, keys: Sequence[str]) -> Any:
    if isinstance(content, list):
        position = int(keys[0])
        return [*content[:position], _removed(content[position], keys[1:]), *content[position + 1 :]]
    if len(keys) == 1:
        return {key: value for key, value in content.items() if key != keys[0]}
    return {**content, keys[0]: _removed(content[keys[0]], keys[1:])}
