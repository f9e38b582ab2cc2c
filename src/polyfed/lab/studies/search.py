"""Search of settings on validation: each kind of settings is multiplied by factors, one kind after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.errors import ConfigError
from polyfed.runs.config_files import with_value
from polyfed.runs.experiment import Experiment

Number = int | float
Choice = Mapping[str, float]
"""Kind of settings -> factor of what there is."""


@dataclass(frozen=True)
class Kind:
    """Settings that have one factor in common.

    Attributes:
        values: path of a setting -> what there is.
        factors: ladder of factors, ascending, 1 among them; empty: doubling and halving without an end.
    """

    values: Mapping[str, Number]
    factors: Sequence[float] = ()

    def at(self, factor: float) -> dict[str, Number]:
        """The settings times a factor; whole numbers stay whole, and at least 1."""
        return {
            path: max(1, round(value * factor)) if isinstance(value, int) else float(f"{value * factor:.12g}")
            for path, value in self.values.items()
        }

    def beside(self, factor: float) -> list[float]:
        """The next factors above and below that make a difference."""
        around = [factor * 2, factor / 2]
        if self.factors:
            place = self.factors.index(factor)
            around = [*self.factors[place + 1 : place + 2], *self.factors[max(0, place - 1) : place]]
        return [other for other in around if self.at(other) != self.at(factor)]

    def is_end(self, factor: float) -> bool:
        """Whether a ladder ends at a factor, beyond which there would be another value."""
        sides = [(self.factors[-1], 2.0), (self.factors[0], 0.5)] if len(self.factors) > 2 else []
        return any(factor == end and self.at(factor * more) != self.at(factor) for end, more in sides)


@dataclass
class PatternSearch:
    """Next candidates of a search, which depend on known figures alone; each kind is searched once.

    Starts from the settings as given. Kind by kind it tries the neighbours of the best candidate, and goes on beyond
    the best one while that improves. Of equal candidates the nearest to the given settings is the best.

    Attributes:
        kinds: Settings to search, in this order.
        most: Most candidates of each kind, including the one that the kind starts from.
        accepts: True for a choice within the bounds of its settings.
        scores: Candidates in the order in which they were tried, each with its figure; NaN: it has none.
    """

    kinds: Mapping[str, Kind]
    most: int
    accepts: Callable[[Choice], bool] = lambda choice: True
    scores: list[tuple[Choice, float]] = field(default_factory=list)
    _turns: list[str] = field(default_factory=list)  # the kind for which each candidate was tried
    _turn: str = ""

    def advance(self, figures: Callable[[Choice], float | None]) -> list[Choice]:
        """Go on as far as figures are known, which else are None; returns the candidates due then, none at the end."""
        while due := self._due():
            known = [(choice, figure) for choice in due if (figure := figures(choice)) is not None]
            if len(known) < len(due):
                return due
            self.scores += known
            self._turns += [self._turn] * len(known)
        return []

    def _due(self) -> list[Choice]:
        if not self.scores:
            return [dict.fromkeys(self.kinds, 1.0)]
        names = list(self.kinds)
        for name in names[names.index(self._turn) if self._turn else 0 :]:
            if due := self._untried(name)[: max(0, self.most - 1 - self._turns.count(name))]:
                self._turn = name
                return due
        return []

    @property
    def best(self) -> Choice:
        """The candidate with the highest figure.

        Raises:
            LookupError: No candidate has a figure.
        """
        if all(math.isnan(figure) for _, figure in self.scores):
            raise LookupError("no candidate has a figure; nothing is chosen")
        return self._best

    @property
    def ends(self) -> list[str]:
        """Kinds in which a better candidate may lie beyond what was tried."""
        best = self._best
        tried = {name: {choice[name] for choice, _ in self.scores} for name in self.kinds}
        return [
            name
            for name, kind in self.kinds.items()
            if kind.is_end(best[name])
            or any(self.accepts({**best, name: factor}) for factor in {*kind.beside(best[name])} - tried[name])
        ]

    @property
    def _best(self) -> Choice:
        known = [one for one in self.scores if not math.isnan(one[1])]
        ranked = known or self.scores[:1]  # where even the given settings have no figure, their neighbours may
        return max(ranked, key=lambda candidate: (candidate[1], -_distance(candidate[0])))[0]

    def _untried(self, name: str) -> list[Choice]:
        """Neighbours of the best candidate in a kind that were not tried."""
        best, tried = self._best, [choice for choice, _ in self.scores]
        beside = [{**best, name: factor} for factor in self.kinds[name].beside(best[name])]
        return [choice for choice in beside if choice not in tried and self.accepts(choice)]


def _distance(choice: Choice) -> float:
    """From what there is, in doublings."""
    return sum(abs(math.log2(factor)) for factor in choice.values())


def choice_label(choice: Choice) -> str:
    """``rate x 2, passes x 0.5``; what has factor 1 is left out."""
    return ", ".join(f"{name} x {factor:g}" for name, factor in choice.items() if factor != 1) or "as given"


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
        if not (changed := self.changed(choice)):
            return self.experiment
        content = self.experiment.model_dump(mode="json")
        for path, value in changed.items():
            content = with_value(content, path.split("."), value, path)
        return Experiment.parse(content)

    def changed(self, choice: Choice) -> dict[str, Number]:
        """Path -> value, of what a choice changes."""
        return {
            path: value
            for name, kind in self.kinds.items()
            for path, value in kind.at(choice.get(name, 1.0)).items()
            if value != kind.values[path]
        }

    def accepts(self, choice: Choice) -> bool:
        """Whether its settings take the values."""
        try:
            self.at(choice)
        except ConfigError:
            return False
        return True


def _is_usable(experiment: Experiment, path: str, value: Number, factors: Sequence[float]) -> bool:
    """Whether the setting takes another value, and that has an effect."""
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
            for name, item in items_of(section)
            if key in ("*", name)
        }
    for place, value in level.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value:
            yield place, value


def items_of(section: Any) -> Iterator[tuple[str, Any]]:
    """Names and contents of the sections below one; numbers in a list, none of a value."""
    if isinstance(section, Mapping):
        yield from section.items()
    elif isinstance(section, list):
        yield from ((str(place), item) for place, item in enumerate(section))
