"""Shapes and textures as conditions on coordinates in the frame of a thing, whose radius is 1."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Coordinates = NDArray[np.float32]
Points = NDArray[np.bool_]


def inside(shape: str, u: Coordinates, v: Coordinates) -> Points:
    """Which points lie inside the shape; u runs right and v down."""
    return _SHAPES[shape](u, v)


def marked(texture: str, u: Coordinates, v: Coordinates) -> Points:
    """Which points have the second tone of the texture; none for ``plain``."""
    return _TEXTURES[texture](u, v)


def _circle(u: Coordinates, v: Coordinates) -> Points:
    return u * u + v * v < 0.85


def _square(u: Coordinates, v: Coordinates) -> Points:
    return np.maximum(abs(u), abs(v)) < 0.72


def _triangle(u: Coordinates, v: Coordinates) -> Points:
    return (v < 0.5) & (v > math.sqrt(3) * abs(u) - 1)


def _star(u: Coordinates, v: Coordinates) -> Points:
    # a fifth of the star, folded on its axis: the edge runs from the tip (1, 0) to the notch at 36 degrees
    fifth = 2 * math.pi / 5
    angle = abs((np.arctan2(u, -v) + fifth / 2) % fifth - fifth / 2)
    radius = np.sqrt(u * u + v * v)
    notch_x, notch_y = 0.45 * math.cos(fifth / 2), 0.45 * math.sin(fifth / 2)
    x, y = radius * np.cos(angle), radius * np.sin(angle)
    return (1 - x) * notch_y > y * (1 - notch_x)


def _cross(u: Coordinates, v: Coordinates) -> Points:
    a, b = abs(u), abs(v)
    return (np.minimum(a, b) < 0.3) & (np.maximum(a, b) < 0.92)


def _ring(u: Coordinates, v: Coordinates) -> Points:
    square = u * u + v * v
    return (square < 0.95) & (square > 0.3)


def _plain(u: Coordinates, v: Coordinates) -> Points:
    return np.zeros(np.broadcast_shapes(u.shape, v.shape), dtype=bool)


def _striped(u: Coordinates, v: Coordinates) -> Points:
    return np.asarray(np.sin(8.5 * u + 0.6) > 0, dtype=bool)


def _dotted(u: Coordinates, v: Coordinates) -> Points:
    return np.asarray(np.cos(8.5 * u) * np.cos(8.5 * v) > 0.35, dtype=bool)


_SHAPES: dict[str, Callable[[Coordinates, Coordinates], Points]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "ring": _ring,
}
_TEXTURES: dict[str, Callable[[Coordinates, Coordinates], Points]] = {
    "plain": _plain,
    "striped": _striped,
    "dotted": _dotted,
}
