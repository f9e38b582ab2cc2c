"""Pattern search: settings are multiplied by factors, one kind of settings after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
        return {path: _times(value, factor) for path, value in self.values.items()}

    def beside(self, factor: float) -> list[float]:
        """The next factors above and below that make a difference."""
        return [other for other in self._next(factor) if self.at(other) != self.at(factor)]

    def _next(self, factor: float) -> list[float]:
        if not self.factors:
            return [factor * 2, factor / 2]
        place = self.factors.index(factor)
        return [*self.factors[place + 1 : place + 2], *self.factors[max(0, place - 1) : place]]


def _times(value: Number, factor: float) -> Number:
    return max(1, round(value * factor)) if isinstance(value, int) else float(f"{value * factor:.12g}")  # no 0.30000004


@dataclass
class PatternSearch:
    """What is to be tried next; depends on scores alone.

    It begins with what there is. Kind by kind it tries the neighbours of the best candidate so far, and goes on from a
    better one in the same kind; it ends when all neighbours of the best are tried, or ``most`` candidates are.

    Attributes:
        kinds: in the order in which they are searched.
        most: candidates.
        accepts: whether a choice can be tried, as settings have bounds of their own.
        scores: candidates in the order in which they were tried, each with its score; NaN: it has none.
    """

    kinds: Mapping[str, Kind]
    most: int
    accepts: Callable[[Choice], bool] = lambda choice: True
    scores: list[tuple[Choice, float]] = field(default_factory=list)
    _turn: int = 0

    def advance(self, score: Callable[[Choice], float | None]) -> list[Choice]:
        """Go on as far as scores are known, which else are None; what is due then, side by side; none at the end."""
        while due := self._due():
            known = [(choice, value) for choice in due if (value := score(choice)) is not None]
            if len(known) < len(due):
                return due
            self.scores += known
        return []

    def _due(self) -> list[Choice]:
        """The next candidates; none at the end."""
        left = self.most - len(self.scores)
        if not self.scores:
            start: Choice = dict.fromkeys(self.kinds, 1.0)
            return [start][:left]
        names = list(self.kinds)
        for turn in range(self._turn, self._turn + len(names)):
            if untried := self._untried(names[turn % len(names)]):
                self._turn = turn % len(names)
                return untried[:left]
        return []

    @property
    def best(self) -> Choice:
        """The candidate with the highest score; of equal ones that nearest to what there is.

        Raises:
            LookupError: none has a score.
        """
        if all(math.isnan(score) for _, score in self.scores):
            raise LookupError("no candidate has a figure; nothing is chosen")
        return self._centre

    @property
    def is_surrounded(self) -> bool:
        """Whether all neighbours of the best were tried."""
        return not any(map(self._untried, self.kinds))

    @property
    def _centre(self) -> Choice:
        return max(self.scores, key=_rank)[0]

    def _untried(self, name: str) -> list[Choice]:
        centre, tried = self._centre, [choice for choice, _ in self.scores]
        beside = [{**centre, name: factor} for factor in self.kinds[name].beside(centre[name])]
        return [choice for choice in beside if choice not in tried and self.accepts(choice)]


def _rank(candidate: tuple[Choice, float]) -> tuple[float, float]:
    choice, score = candidate
    return -math.inf if math.isnan(score) else score, -sum(abs(math.log2(factor)) for factor in choice.values())


def choice_label(choice: Choice) -> str:
    """``rate x 2, passes x 0.5``; what has factor 1 is left out."""
    return ", ".join(f"{name} x {factor:g}" for name, factor in choice.items() if factor != 1) or "as given"
