"""How many test items a first experiment wants: as many as tell a middling figure from chance."""

from __future__ import annotations

import math
from dataclasses import dataclass

_NORMAL = 1.96  # 95 % of a normal distribution lie within so many deviations
_RANKS = 10  # retrieval is judged by the first so many of a gallery
_FEWEST, _MOST = 0.1, 0.2  # share of a split that is drawn


@dataclass(frozen=True)
class SplitSize:
    """Items that a participant is judged on.

    Attributes:
        items: of the split.
        chance: share of the items that have the most frequent class, which one answer to all gets right; None: the
            right item is searched for among all.
    """

    items: int
    chance: float | None = None

    @property
    def needed(self) -> int:
        """The fewest items of which a figure halfway between chance and 100 % has an interval narrower than half of
        its distance from chance."""
        return next(count for count in range(2, 1_000_000) if self._tells(count))

    @property
    def share(self) -> float:
        """Share to be drawn for validation, and for test, of as many items in all.

        Where no share that leaves enough for training could tell anything, training has the items.
        """
        if self.items < 2 * self.needed:
            return _FEWEST
        return round(min(_MOST, max(_FEWEST, self.needed / max(self.items, 1))), 2)

    def _tells(self, count: int) -> bool:
        chance = min(1.0, _RANKS / count) if self.chance is None else self.chance
        middle = (1 + chance) / 2
        return 2 * _NORMAL * math.sqrt(middle * (1 - middle) / count) < (middle - chance) / 2

    def warning(self, split: str) -> str:
        """What is missing, in words; empty where nothing is."""
        if self.items >= self.needed:
            return ""
        return (
            f"{split}: {self.items} items cannot tell a middling figure from chance, {self.needed} could: "
            f"{self.needed - self.items} are missing"
        )
