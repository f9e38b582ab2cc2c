"""What is in a scene, and where, given what determines a generated split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any, Literal, TypeVar

import numpy as np

from polyfed.core.randomness import derive_seed
from polyfed.core.untrusted import yaml_content

VERSION = 1
"""Version of the generator; raised whenever the same recipe would give another scene, picture or text."""

Domain = Literal["day", "night", "sketch"]

TABLES: dict[str, Any] = yaml_content(resources.files(__package__).joinpath("tables.yaml").read_text("utf-8"))
"""Names of what is in scenes, and how each is said, drawn and heard."""

SHAPES, COLOURS, TEXTURES, RELATIONS = (tuple(TABLES[key]) for key in ("shapes", "colours", "textures", "relations"))
LABELS = tuple(f"{texture} {shape}" for shape in SHAPES for texture in TEXTURES)

_MARGIN = 0.02
_TRIES = 25

_T = TypeVar("_T")


def pick(options: Sequence[_T], rng: np.random.Generator) -> _T:
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
        return f"scenes-{self.seed}-{self.split}-{index:06d}"

    @property
    def siblings(self) -> int:
        """Scenes in a row that show the same shapes in other colours or relations, 1 to 4."""
        return 1 + round(3 * self.difficulty)

    @property
    def most_things(self) -> int:
        """The largest number of things in a scene, 3 to 5; the smallest is 2."""
        return 3 + round(2 * self.difficulty)


@dataclass(frozen=True)
class Thing:
    """One shape of a scene; lengths are shares of the picture's side, x runs right and y down.

    Attributes:
        shape: one of SHAPES.
        colour: one of COLOURS.
        texture: one of TEXTURES.
        size: size as people would call it.
        radius: radius of the circle around it.
        x: centre.
        y: centre.
        turn: rotation in radians.
    """

    shape: str
    colour: str
    texture: str
    size: str
    radius: float
    x: float = 0.5
    y: float = 0.5
    turn: float = 0.0

    @property
    def label(self) -> int:
        return SHAPES.index(self.shape) * len(TEXTURES) + TEXTURES.index(self.texture)


@dataclass(frozen=True)
class Scene:
    """The things of a scene.

    Attributes:
        things: the main thing, which is the largest, the one it is related to, and any others.
        depth: numbers of the things from the farthest to the nearest, which hides parts of the others.
    """

    things: tuple[Thing, ...]
    depth: tuple[int, ...]


def relation(a: Thing, b: Thing) -> str | None:
    """Where ``a`` is, seen from ``b``; None if that is not clear: they lie diagonally, or too close."""
    dx, dy = a.x - b.x, a.y - b.y
    # people call a thing "left of" another only if it is clearly more left than above or below
    if max(abs(dx), abs(dy)) < max(0.1, 1.3 * min(abs(dx), abs(dy))):
        return None
    if abs(dx) > abs(dy):
        return "left" if dx < 0 else "right"
    return "above" if dy < 0 else "below"


def arrange(recipe: SceneRecipe, index: int) -> Scene:
    """Scene number ``index``.

    ``recipe.siblings`` scenes in a row share the shapes and textures of their two main things; they differ in
    the relation between them, and every other one has their colours exchanged. So a model must bind
    attributes and understand relations to tell siblings apart.
    """
    family, rank = divmod(index, recipe.siblings)
    main, second, first_relation = _family(recipe, family)
    if rank % 2:
        main, second = replace(main, colour=second.colour), replace(second, colour=main.colour)
    rng = recipe.stream("layout", index)
    placed = _related(main, second, RELATIONS[(first_relation + rank) % 4], recipe.difficulty, rng)
    others = int(rng.integers(2, recipe.most_things + 1)) - 2
    for _ in range(others):
        thing = _thing(_smaller(main.size, rng), int(rng.integers(len(COLOURS))), rng)
        if rng.random() < 1 / 3:  # a shape that is there already
            thing = replace(thing, shape=pick(placed, rng).shape)
        placed.append(_placed(thing, placed, recipe.difficulty, rng))
    things = []
    for thing in placed:
        # squares and crosses look the same after a quarter turn
        most = math.pi / 4 if thing.shape in ("square", "cross") else math.pi
        share = 0.15 + 0.85 * recipe.difficulty
        things.append(replace(thing, turn=_uniform(-1, 1, rng) * (share * most)))
    return Scene(tuple(things), tuple(int(i) for i in rng.permutation(len(things))))


def shown(recipe: SceneRecipe, index: int) -> Thing:
    """The main thing of scene number ``index``, but for its place, turn and colour: what labels and topics go by."""
    return _family(recipe, index // recipe.siblings)[0]


@lru_cache(maxsize=4096)
def _family(recipe: SceneRecipe, number: int) -> tuple[Thing, Thing, int]:
    """Both main things that siblings share, and the number of the first sibling's relation."""
    rng = recipe.stream("family", number)
    size: str = "large" if rng.random() < 0.7 else "medium"
    main = _thing(size, int(rng.integers(len(COLOURS))), rng)
    step = int(rng.integers(1, len(COLOURS)))
    second = _thing(_smaller(size, rng), (COLOURS.index(main.colour) + step) % len(COLOURS), rng)
    return main, second, int(rng.integers(4))


def _uniform(low: float, high: float, rng: np.random.Generator) -> float:
    """What ``rng.uniform`` draws, in a third of its time."""
    return low + (high - low) * rng.random()


def _thing(size: str, colour: int, rng: np.random.Generator) -> Thing:
    shape, texture = pick(SHAPES, rng), pick(TEXTURES, rng)
    radius = TABLES["sizes"][size]["radius"] * _uniform(0.92, 1.1, rng)
    return Thing(shape, COLOURS[colour], texture, size, radius)


def _smaller(size: str, rng: np.random.Generator) -> str:
    return "medium" if size == "large" and rng.random() < 0.6 else "small"


def _related(main: Thing, second: Thing, where: str, difficulty: float, rng: np.random.Generator) -> list[Thing]:
    """Both things inside the picture, the main one ``where`` of the second."""
    direction = TABLES["relations"][where]["direction"] * math.pi / 2
    angle = direction + _uniform(-0.55, 0.55, rng) * (0.4 + 0.6 * difficulty)
    apart = (main.radius + second.radius) * _uniform(1.05 - 0.25 * difficulty, 1.35, rng)
    dx, dy = apart * math.cos(angle), apart * math.sin(angle)
    centre = []
    for step in (dx, dy):  # both circles inside the picture, with a margin
        low = max(second.radius, main.radius - step) + _MARGIN
        high = 1 - max(second.radius, main.radius + step) - _MARGIN
        centre.append(_uniform(low, high, rng) if low < high else (low + high) / 2)
    x, y = centre
    return [replace(main, x=x + dx, y=y + dy), replace(second, x=x, y=y)]


def _placed(thing: Thing, placed: list[Thing], difficulty: float, rng: np.random.Generator) -> Thing:
    """The thing where it overlaps the others least, or little enough."""
    best, least = (thing.x, thing.y), math.inf
    edge = thing.radius + _MARGIN
    # some scenes have no free place: the best of a few tries then
    for _ in range(_TRIES):
        x, y = _uniform(edge, 1 - edge, rng), _uniform(edge, 1 - edge, rng)
        overlap = max(1 - math.hypot(x - o.x, y - o.y) / (thing.radius + o.radius) for o in placed)
        if overlap < least:
            best, least = (x, y), overlap
        if least <= 0.3 * difficulty:
            break
    return replace(thing, x=best[0], y=best[1])
