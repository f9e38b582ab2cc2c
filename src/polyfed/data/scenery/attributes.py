"""A scene as a row of a table: numbers and names of what is in it, some of them not known."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from polyfed.data.scenery.layout import Scene, SceneRecipe

_CORNERS = {"circle": 0, "ring": 0, "triangle": 3, "square": 4, "star": 10, "cross": 12}
_GAPS = 0.2  # share of unknown cells in the hardest tables

# column -> type, and its value in a scene; the main thing is the first, the one it is related to the second
ATTRIBUTES: dict[str, tuple[pa.DataType, Callable[[Scene], float | str]]] = {
    "things": (pa.int64(), lambda scene: len(scene.things)),
    "colours": (pa.int64(), lambda scene: len({thing.colour for thing in scene.things})),
    "colour": (pa.string(), lambda scene: scene.things[0].colour),
    "other_colour": (pa.string(), lambda scene: scene.things[1].colour),
    "size": (pa.string(), lambda scene: scene.things[0].size),
    "corners": (pa.int64(), lambda scene: _CORNERS[scene.things[0].shape]),
    "other_corners": (pa.int64(), lambda scene: _CORNERS[scene.things[1].shape]),
    "x": (pa.float64(), lambda scene: scene.things[0].x),
    "y": (pa.float64(), lambda scene: scene.things[0].y),
    "other_x": (pa.float64(), lambda scene: scene.things[1].x),
    "other_y": (pa.float64(), lambda scene: scene.things[1].y),
}


def attribute(name: str, scene: Scene, recipe: SceneRecipe, index: int) -> float | str | None:
    """The value of a column; None where it is not known, the more often the higher the difficulty."""
    if recipe.stream(f"gap {name}", index).random() < _GAPS * recipe.difficulty:
        return None
    return ATTRIBUTES[name][1](scene)
