"""When a setting has an effect: declared beside its field, checked alike for all settings, and shown by listings.

    kd_joint: bool = False
    server_epochs: Annotated[int, Only(kd_joint=False)] = Field(default=1, ge=0)

A value other than the default is refused where the condition does not hold. What fellow settings decide (``Only``) is
checked as settings are validated; what surrounds them decides (``Where``) is checked by whoever knows it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from pydantic import BaseModel

CONDITIONS = "only_if"
"""Class attribute of settings with conditions of inherited fields, which replace inherited conditions."""

Facts = Mapping[str, bool]
"""What is known of the surroundings: fact -> whether it is so."""


SINGLE = "clients of one modality"
SEVERAL = "clients of several modalities"
SEVERAL_TYPES = "clients of several types"
PAIRING = "clients whose task matches pairs"


class NoEffectError(ValueError):
    """A setting has no effect.

    Attributes:
        name: of the setting, with its path from the settings that were checked.
        value: as YAML has it.
        obstacle: why it has none, as the continuation of 'has no effect'.
        default: its value if it is left out, likewise.
    """

    def __init__(self, name: str, value: str, obstacle: str, default: str, wanted: str = "") -> None:
        super().__init__(f"{name} has no effect {obstacle}; it is {value}: leave it at {default}{wanted}")
        self.name, self.value, self.obstacle, self.default = name, value, obstacle, default


class Condition(ABC):
    """What must be so for a setting to have an effect; its text is what one reads after 'only with'."""

    @abstractmethod
    def holds(self, settings: BaseModel, facts: Facts) -> bool:
        """Whether it is so, given the fellow settings and the known facts; what is not known counts as so."""

    def obstacle(self, settings: BaseModel, facts: Facts) -> str:
        """Why it is not so, as the continuation of 'has no effect'."""
        return f"without {self}"

    def __and__(self, other: Condition) -> Condition:
        return _Joined((self, other), every=True)

    def __or__(self, other: Condition) -> Condition:
        return _Joined((self, other), every=False)


@dataclass(frozen=True)
class Not:
    """Any value but this one."""

    value: Any

    def __str__(self) -> str:
        return f" other than {shown(self.value)}"


@dataclass(frozen=True)
class Such:
    """Any value of which a test holds, and what that means in words."""

    test: Callable[[Any], bool]
    words: str

    def __str__(self) -> str:
        return f": {self.words}"


class Only(Condition):
    """Fellow settings have these values: each one value, ``Not`` one, one of a set, or ``Such`` a one."""

    def __init__(self, **wanted: Any) -> None:
        self._wanted = wanted

    def holds(self, settings: BaseModel, facts: Facts) -> bool:
        """See ``Condition``."""
        return not self._unmet(settings)

    def obstacle(self, settings: BaseModel, facts: Facts) -> str:
        return "with " + " and ".join(f"{key}: {shown(getattr(settings, key))}" for key in self._unmet(settings))

    def _unmet(self, settings: BaseModel) -> list[str]:
        unmet = []
        for key, wanted in self._wanted.items():
            value = getattr(settings, key)
            if isinstance(wanted, Not):
                is_met = value != wanted.value
            elif isinstance(wanted, Such):
                is_met = wanted.test(value)
            else:
                is_met = value in wanted if isinstance(wanted, set) else value == wanted
            if not is_met:
                unmet.append(key)
        return unmet

    def __str__(self) -> str:
        parts = []
        for key, wanted in self._wanted.items():
            values = sorted(wanted) if isinstance(wanted, set) else [wanted]
            in_words = str(wanted) if isinstance(wanted, Not | Such) else ": " + " or ".join(map(shown, values))
            parts.append(f"{key}{in_words}")
        return " and ".join(parts)


@dataclass(frozen=True)
class Where(Condition):
    """A fact about what surrounds the settings, in words."""

    fact: str

    def holds(self, settings: BaseModel, facts: Facts) -> bool:
        """See ``Condition``."""
        return facts.get(self.fact, True)

    def __str__(self) -> str:
        return self.fact


@dataclass(frozen=True)
class Never(Condition):
    """An inherited setting that a class has no use for, and why."""

    why: str

    def holds(self, settings: BaseModel, facts: Facts) -> bool:
        return False

    def obstacle(self, settings: BaseModel, facts: Facts) -> str:
        return f"here ({self.why})"

    def __str__(self) -> str:
        return self.why


class Always(Condition):
    """An inherited setting that has an effect here whatever was declared."""

    def holds(self, settings: BaseModel, facts: Facts) -> bool:
        return True

    def __str__(self) -> str:
        return ""


class _Joined(Condition):
    def __init__(self, parts: tuple[Condition, ...], *, every: bool) -> None:
        self._parts, self._every = parts, every

    def holds(self, settings: BaseModel, facts: Facts) -> bool:
        return (all if self._every else any)(part.holds(settings, facts) for part in self._parts)

    def obstacle(self, settings: BaseModel, facts: Facts) -> str:
        """Of the parts those that do not hold."""
        unmet = [part for part in self._parts if not part.holds(settings, facts)]
        return " and ".join(dict.fromkeys(part.obstacle(settings, facts) for part in unmet))

    def __str__(self) -> str:
        parts = [
            f"({part})" if self._every and isinstance(part, _Joined) and not part._every else str(part)
            for part in self._parts
        ]
        return (" and " if self._every else " or ").join(parts)


class Inner:
    """Conditions of fields of the settings that a field holds, by name."""

    def __init__(self, **conditions: Condition) -> None:
        self.conditions = conditions


@cache
def conditions_of(kind: type[BaseModel]) -> Mapping[str, Condition]:
    """Field -> condition, or ``field.inner`` -> condition; what a class says replaces what its bases say."""
    declared: dict[str, Condition] = {}
    for base in reversed(kind.__mro__):  # bases first, so that what the class itself says comes last and counts
        if issubclass(base, BaseModel):
            declared |= _declared_in(base)
    unknown = [name for name in declared if name.partition(".")[0] not in kind.model_fields]
    if unknown:
        raise TypeError(f"{kind.__name__}.{CONDITIONS} names '{unknown[0]}', which is no field")
    return {name: condition for name, condition in declared.items() if not isinstance(condition, Always)}


def _declared_in(kind: type[BaseModel]) -> dict[str, Condition]:
    """What a class says itself: beside its own fields, and in its table of conditions."""
    declared: dict[str, Condition] = {}
    for name in inspect.get_annotations(kind):
        for item in kind.model_fields[name].metadata if name in kind.model_fields else ():
            if isinstance(item, Condition):
                declared[name] = item
            elif isinstance(item, Inner):
                declared |= {f"{name}.{key}": condition for key, condition in item.conditions.items()}
    table: Mapping[str, Condition] = vars(kind).get(CONDITIONS, {})
    return declared | dict(table)


def require_effect(settings: BaseModel, facts: Facts, path: str = "") -> None:
    """Check that each value that is not the default has an effect.

    Args:
        settings: to check.
        facts: what is known of their surroundings.
        path: of the settings, with a dot at its end, for messages.

    Raises:
        NoEffectError: one has none; the message says which, why, and what to change.
    """
    for name, condition in conditions_of(type(settings)).items():
        outer, _, inner = name.partition(".")
        value = getattr(settings, outer)
        default = type(settings).model_fields[outer].get_default(call_default_factory=True)
        if inner and value is None:  # a condition of inner settings that are not there
            continue
        if inner:
            value, default = getattr(value, inner), getattr(default, inner)
        if value != default and not condition.holds(settings, facts):
            wanted = "" if isinstance(condition, Never) else f" (it acts only with {condition})"
            obstacle = condition.obstacle(settings, facts)
            raise NoEffectError(f"{path}{name}", shown(value), obstacle, shown(default), wanted)


def require_effects_beneath(value: Any, facts: Facts, path: str) -> None:
    """``require_effect`` of all settings within a value: itself, in its fields, in collections."""
    for where, settings in _settings_in(value, path):
        require_effect(settings, facts, f"{where}.")


def shown(value: Any) -> str:
    """A value as YAML would have it, on one line."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    plain = list(plain) if isinstance(plain, tuple) else plain
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=1000)
    return text.removesuffix("\n...\n").strip()


def _settings_in(value: Any, path: str) -> Iterator[tuple[str, BaseModel]]:
    if isinstance(value, BaseModel):
        yield path, value
        for name in type(value).model_fields:
            yield from _settings_in(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _settings_in(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _settings_in(item, f"{path}.{number}")
