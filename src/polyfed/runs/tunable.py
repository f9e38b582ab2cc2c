"""What of an experiment can be tuned: numbers at given paths, that its settings let be multiplied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.errors import ConfigError
from polyfed.runs.experiment import Experiment
from polyfed.runs.pattern_search import Choice, Kind, Number

_OF_TRAINING = "server.training."
Ladders = Mapping[str, tuple[Sequence[str], Sequence[float]]]
"""Kind of settings -> paths, where * stands for every name, and factors."""


@dataclass(frozen=True)
class Tunable:
    """An experiment and the kinds of settings that it has.

    Attributes:
        experiment: as it is without tuning.
        kinds: by name.
    """

    experiment: Experiment
    kinds: Mapping[str, Kind]

    @classmethod
    def of(
        cls, experiment: Experiment, ladders: Ladders, is_fixed: Callable[[str], bool] = lambda path: False
    ) -> Tunable:
        """With those of the kinds of which it has a path that is a number, and not fixed, and takes another value."""
        content = experiment.model_dump(mode="json")
        kinds = {}
        for name, (paths, factors) in ladders.items():
            numbers = {path: value for given in paths for path, value in _numbers(content, given) if not is_fixed(path)}
            usable = {path: value for path, value in numbers.items() if _is_usable(experiment, path, value, factors)}
            if usable:
                kinds[name] = Kind(usable, factors)
        return cls(experiment, kinds)

    def at(self, choice: Choice) -> Experiment:
        """The experiment with a choice; kinds that it lacks stay out.

        Raises:
            ConfigError: its settings do not take the values.
        """
        values = {
            path: value for name, kind in self.kinds.items() for path, value in kind.at(choice.get(name, 1.0)).items()
        }
        given = {path: value for kind in self.kinds.values() for path, value in kind.values.items()}
        if values == given:
            return self.experiment
        content = self.experiment.model_dump(mode="json")
        for path, value in values.items():
            content = _changed(content, path.split("."), value)
        return Experiment.parse(content)

    def accepts(self, choice: Choice) -> bool:
        """Whether its settings take the values."""
        try:
            self.at(choice)
        except ConfigError:
            return False
        return True


def _is_usable(experiment: Experiment, path: str, value: Number, factors: Sequence[float]) -> bool:
    """Whether the setting takes a value beside its own, and that has an effect."""
    if path.startswith(_OF_TRAINING) and experiment.algorithm.server_passes == 0:
        return False  # the server averages, and never trains
    alone = Tunable(experiment, {"": Kind({path: value}, factors)})
    return any(alone.accepts({"": factor}) for factor in alone.kinds[""].beside(1.0))


def _numbers(content: Any, path: str) -> Iterator[tuple[str, Number]]:
    """Settings that a path stands for and that are numbers other than 0, which no factor changes."""
    level = {"": content}
    for key in path.split("."):
        level = {
            f"{above}.{name}".lstrip("."): item
            for above, section in level.items()
            for name, item in _items(section)
            if key in ("*", name)
        }
    for place, value in level.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value:
            yield place, value


def _items(section: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(section, Mapping):
        yield from section.items()
    elif isinstance(section, list):
        yield from ((str(place), item) for place, item in enumerate(section))


def _changed(content: Any, keys: Sequence[str], value: Number) -> Any:
    if not keys:
        return value
    key: Any = int(keys[0]) if isinstance(content, list) else keys[0]
    changed = _changed(content[key], keys[1:], value)
    if isinstance(content, list):
        return [*content[:key], changed, *content[key + 1 :]]
    return {**content, key: changed}
