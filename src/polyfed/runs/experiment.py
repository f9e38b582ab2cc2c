"""Experiments: all settings of a run, validated before any work starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from polyfed.core.errors import ConfigError
from polyfed.core.files import paths_from
from polyfed.core.settings import NoEffectError, S, first_problem, innermost_problem, parse_settings, shown
from polyfed.federation.plan import FederationPlan
from polyfed.runs.config_files import layers_of, merged, overridden, read_layers, start_of, value_at, with_value
from polyfed.runs.preflight import checked_plan
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
        reports it; the settings of an override must have an effect. A component with a new ``name`` keeps the
        settings that both have, and a warning lists the dropped ones. An experiment with ``twin`` becomes that twin.

        Raises:
            ConfigError: unknown preset or key, a value out of range or without effect, a file that is not YAML, an
                experiment that has no such twin, or settings that do not fit each other or the method.
            DataError: a source has no such split.
        """
        experiment = cls.read(source, overrides, warns=True)
        _ = experiment.plan
        for sink in experiment.run.output.sinks:
            sink.require()
        return experiment

    @cached_property
    def plan(self) -> FederationPlan:
        """The federation that the settings describe, checked once: by ``load``, else before a run.

        Raises:
            ConfigError: settings do not fit each other, or the method, or a package is missing.
            DataError: a source has no such split.
        """
        return checked_plan(self)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other settings, whose plan is its own."""
        copied = super().model_copy(update=update, deep=deep)
        vars(copied).pop("plan", None)
        return copied

    @classmethod
    def read(
        cls, source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, warns: bool = False
    ) -> Experiment:
        """Load settings without checking that they fit together, to build on them or to reopen a run.

        Components that overrides replace as a unit are warned of if ``warns``: a study replaces them by row.
        """
        if isinstance(source, Mapping):
            return cls._read(layers_of(source, Path()), overrides, warns)
        folder = Path(source).absolute().parent
        start = start_of(folder)  # of a run's configuration
        with paths_from(start, start or folder):
            return cls._read(read_layers(source), overrides, warns)

    @classmethod
    def _read(cls, layers: Sequence[Mapping[str, Any]], overrides: Sequence[str], warns: bool) -> Experiment:
        content, named, replaced = overridden(reduce(merged, layers, {}), overrides)
        swapped, replaced_units = dict[str, Any](), dict[str, Any]()
        for path, left in replaced.items():
            own = value_at(content, path.split("."))
            if f"{path}.name" in named and isinstance(own, Mapping):
                swapped[path] = own
                content = with_value(content, path.split("."), merged(left, own), path)
            elif warns:
                replaced_units[path] = left
        made = content["twin"] if isinstance(content.get("twin"), Mapping) else {}
        if made.get("of") and any(name.split(".")[0] == "twin" for name in named):
            raise ConfigError(f"twin: this is a twin of '{made['of']}' already; give that experiment itself")
        experiment = _without_idle(cls, content, lambda path: _is_set(path, layers[-1], named), swapped)
        for path, left in replaced_units.items():  # after all refusals
            keep = f"'--set {path}.name=...' keeps what both have"
            log.warning("%s: settings of the component before are dropped: %s; %s", path, shown(left), keep)
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


def _without_idle(
    settings_class: type[S], content: dict[str, Any], is_own: Callable[[str], bool], swapped: Mapping[str, Any]
) -> S:
    """Settings of the content without inherited ones that have no effect next to own ones.

    Nor with what components that were ``swapped`` for others (path -> what was set of them) do not take of these.
    """
    dropped: dict[str, dict[str, Any]] = {}
    # one at a time: with one back at its default, another may have an effect again
    while True:
        try:
            settings = settings_class.model_validate(content)
        except ValidationError as error:
            section, problem = innermost_problem(error)
            refusal = problem.get("ctx", {}).get("error")
            # whose name may be a path itself; of a key that is unknown, too
            path = ".".join(filter(None, (*section, getattr(refusal, "name", ""))))
            value = value_at(content, path.split("."), _ABSENT)
            place = next((place for place in swapped if path.startswith(f"{place}.")), "")
            below = path.removeprefix(f"{place}.")
            is_left = place and value is not _ABSENT and value_at(swapped[place], below.split("."), _ABSENT) is _ABSENT
            if is_left:
                dropped.setdefault(place, {})[below] = value
            # what has no place in the file follows from others of it, as groups from sites
            elif value is _ABSENT or is_own(path) or not isinstance(refusal, NoEffectError):
                raise ConfigError(first_problem(error)) from error
            else:
                message = "%s: %s has no effect %s; left at its default, %s"
                log.warning(message, path, refusal.value, refusal.obstacle, refusal.default)
            content = _removed(content, path.split("."))
        else:
            for place, left in dropped.items():
                name = value_at(content, [*place.split("."), "name"])
                log.warning("%s: '%s' does not take, and drops, of the one before: %s", place, name, shown(left))
            return settings


def _is_set(path: str, top: Mapping[str, Any], overrides: Sequence[str]) -> bool:
    """Whether a setting is set by an override or, where there are none, by the topmost file."""
    if overrides:
        return any(f"{path}.".startswith(f"{name}.") for name in overrides)
    return value_at(top, path.split("."), _ABSENT) is not _ABSENT


def _removed(content: Any, keys: Sequence[str]) -> Any:
    if isinstance(content, list):
        position = int(keys[0])
        return [*content[:position], _removed(content[position], keys[1:]), *content[position + 1 :]]
    if len(keys) == 1:
        return {key: value for key, value in content.items() if key != keys[0]}
    return {**content, keys[0]: _removed(content[keys[0]], keys[1:])}
