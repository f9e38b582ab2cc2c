"""What determines a generated split, and the random streams of its scenes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from polyfed.core.randomness import derive_seed

VERSION = 1
"""Version of the generator; raised whenever the same recipe would give another scene, picture or text."""

_T = TypeVar("_T")

Domain = Literal["day", "night", "sketch"]


def pick(options: Sequence[_T], rng: np.random.Generator) -> _T:
    """One of the options, all equally likely."""
    return options[int(rng.integers(len(options)))]


@dataclass(frozen=True)
class SceneRecipe:
    """All that n scenes of one split depend on; scene i depends on everything but ``count``.

    Attributes:
        seed: seed of the data set.
        split: name of the split.
        count: number of scenes, n.
        size: height and width of a picture in pixels.
        difficulty: 0 (easy) to 1.
        domain: style of the pictures.
        shift: 0 (none) to 1, how far colours and contrast are moved away from the domain's own.
    """

    seed: int
    split: str
    count: int
    size: int = 64
    difficulty: float = 0.5
    domain: Domain = "day"
    shift: float = 0.0

    def stream(self, purpose: str, index: int) -> np.random.Generator:
        """The stream of one scene for one purpose; streams do not disturb each other."""
        return np.random.default_rng(derive_seed(self.seed, "scenes", VERSION, self.split, purpose, index))

    def scene_id(self, index: int) -> str:
        """The same content has the same id, whatever its domain."""
        return f"scenes-{self.seed}-{self.split}-{index:06d}"

    @property
    def siblings(self) -> int:
        """Scenes in a row that show the same shapes in other colours or relations, 1 to 4."""
        return 1 + round(3 * self.difficulty)

    @property
    def most_things(self) -> int:
        """The largest number of things in a scene, 3 to 5; the smallest is 2."""
        return 3 + round(2 * self.difficulty)
