"""How a scene looks: pixels and the mask of its main thing, in the style of a domain."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from polyfed.data.scenery.layout import Domain, Scene, SceneRecipe, Thing

_Floats = NDArray[np.float32]
_Points = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Rgb = tuple[float, float, float]

TONES: dict[str, Rgb] = {
    "red": (0.86, 0.13, 0.13),
    "orange": (0.95, 0.52, 0.08),
    "yellow": (0.93, 0.85, 0.15),
    "green": (0.20, 0.62, 0.18),
    "teal": (0.10, 0.68, 0.68),
    "blue": (0.15, 0.28, 0.86),
    "purple": (0.50, 0.18, 0.68),
    "pink": (0.96, 0.50, 0.72),
}


@dataclass(frozen=True)
class Style:
    """How a domain looks; colours are red, green, blue from 0 to 1.

    Attributes:
        backgrounds: colours that a background runs between.
        clutter: darkest and lightest channel value of clutter.
        grey: what the tones of things are mixed with.
        mix: share of that grey in a tone.
        contrast: how far the second tone of a texture goes from the first towards ``accent``.
        accent: what the second tone is mixed with.
        outline: width of the contour that things are drawn with, in radii; 0 for filled things.
    """

    backgrounds: tuple[Rgb, ...]
    clutter: tuple[float, float]
    grey: Rgb
    mix: float
    contrast: float
    accent: Rgb
    outline: float = 0.0


STYLES: dict[Domain, Style] = {
    "day": Style(
        backgrounds=((0.92, 0.93, 0.95), (0.75, 0.85, 0.93), (0.90, 0.86, 0.76), (0.74, 0.80, 0.68),
                     (0.70, 0.68, 0.70)),
        clutter=(0.25, 0.9), grey=(0.5, 0.5, 0.5), mix=0.0, contrast=0.72, accent=(1.0, 1.0, 1.0),
    ),
    "night": Style(
        backgrounds=((0.04, 0.05, 0.12), (0.10, 0.09, 0.20), (0.05, 0.12, 0.14), (0.15, 0.12, 0.12)),
        clutter=(0.0, 0.5), grey=(0.12, 0.14, 0.30), mix=0.35, contrast=0.75, accent=(0.02, 0.02, 0.08),
    ),
    "sketch": Style(
        backgrounds=((0.97, 0.96, 0.93), (0.90, 0.89, 0.86)),
        clutter=(0.3, 0.7), grey=(0.35, 0.35, 0.35), mix=0.3, contrast=0.85, accent=(0.97, 0.96, 0.93),
        outline=0.2,
    ),
}  # fmt: skip

_TINT = np.array([[0.55, 0.35, 0.10], [0.10, 0.60, 0.30], [0.35, 0.05, 0.60]], dtype=np.float32)
_PALE = np.array([0.30, 0.24, 0.14], dtype=np.float32)

_Box = tuple[slice, slice]

_FINER = 3
_RUNS = 3  # zlib's run-length strategy: noise does not compress, flat masks do


def picture(scene: Scene, recipe: SceneRecipe, index: int) -> tuple[Bytes, Bytes]:
    """The scene as pixels, size x size x 3, and the mask of what is visible of its main thing, 0 or 255.

    Each thing is sampled at 3 x 3 points a pixel, which smooths its edges.
    """
    rng, style = recipe.stream("pixels", index), STYLES[recipe.domain]
    canvas = _background(recipe, style, rng)
    _clutter(canvas, recipe, style, rng)
    light = float(rng.uniform(0, 2 * math.pi))
    # the mask is what is left of the main thing when nearer things have been painted over it
    visible = np.zeros(canvas.shape[:2], dtype=np.float32)
    for number in scene.depth:
        box, alpha = _paint(canvas, scene.things[number], recipe, style, light, rng)
        visible[box] = np.maximum(visible[box], alpha) if number == 0 else visible[box] * (1 - alpha)
    canvas *= float(rng.uniform(0.9 - 0.2 * recipe.difficulty, 1.1))
    canvas += (0.015 + 0.075 * recipe.difficulty) * rng.standard_normal(canvas.shape, dtype=np.float32)
    pixels = (shifted(canvas, recipe.shift).clip(0, 1) * 255).astype(np.uint8)
    return pixels, np.where(visible >= 0.5, 255, 0).astype(np.uint8)


def png(pixels: Bytes) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1, compress_type=_RUNS)
    return buffer.getvalue()


@lru_cache(maxsize=4)
def _grid(size: int) -> tuple[_Floats, _Floats]:
    """x (1 x size) and y (size x 1) of the pixel centres, 0 to 1."""
    steps = _floats((np.arange(size, dtype=np.float32) + 0.5) / size)
    return steps[None, :], steps[:, None]


def _background(recipe: SceneRecipe, style: Style, rng: np.random.Generator) -> _Floats:
    """A gradient between two background colours, with soft waves."""
    x, y = _grid(recipe.size)
    near, far = (_floats(style.backgrounds[i]) for i in rng.integers(len(style.backgrounds), size=2))
    tilt, phase = (float(value) for value in rng.uniform(0, 2 * math.pi, size=2))
    slope = 0.5 + 0.5 * (math.cos(tilt) * (x - 0.5) + math.sin(tilt) * (y - 0.5))
    waves = np.sin(float(rng.uniform(6, 20)) * x + phase) * np.sin(float(rng.uniform(6, 20)) * y - phase)
    shade = slope + np.float32(0.1 + 0.25 * recipe.difficulty) * waves
    return _floats(near + (far - near) * _floats(shade)[:, :, None])


def _clutter(canvas: _Floats, recipe: SceneRecipe, style: Style, rng: np.random.Generator) -> None:
    """Small strokes that nobody mentions."""
    size, count = recipe.size, round(16 * recipe.difficulty)
    corners = rng.integers(size, size=(count, 2))
    extents = rng.integers(1, max(2, size // 9), size=(count, 2))
    extents[np.arange(count), rng.integers(2, size=count)] = max(1, size // 64)
    tones = rng.uniform(*style.clutter, size=(count, 3)).astype(np.float32)
    for (row, column), (height, width), tone in zip(corners, extents, tones, strict=True):
        patch = canvas[row : row + height, column : column + width]
        patch += (tone - patch) * np.float32(0.6)


def _paint(
    canvas: _Floats, thing: Thing, recipe: SceneRecipe, style: Style, light: float, rng: np.random.Generator
) -> tuple[_Box, _Floats]:
    """Paint one thing; returns the box that it lies in and how much of each pixel there it covers."""
    box, u, v = _local(thing, recipe.size)
    within = inside(thing.shape, u, v)
    tone, second = colour_of(thing.colour, style, recipe.difficulty, rng)
    marks = marked(thing.texture, u, v)
    if style.outline:
        core = inside(thing.shape, u / (1 - style.outline), v / (1 - style.outline))
        # outlined things are filled with the second tone
        marks = core & ~marks if thing.texture != "plain" else core
    alpha = _coarse(within)
    second_share = _coarse(within & marks)[:, :, None]
    centre = (slice(_FINER // 2, None, _FINER),) * 2
    gleam = 1 + 0.25 * (math.cos(light) * u[centre] + math.sin(light) * v[centre])[:, :, None]
    colour = (tone * (alpha[:, :, None] - second_share) + second * second_share) * gleam
    canvas[box] = canvas[box] * (1 - alpha[:, :, None]) + colour
    return box, alpha


def _local(thing: Thing, size: int) -> tuple[_Box, _Floats, _Floats]:
    rows, columns = _span(thing.y, thing.radius, size), _span(thing.x, thing.radius, size)
    x, y = _samples(columns, thing.x, thing.radius, size), _samples(rows, thing.y, thing.radius, size)
    cos, sin = np.float32(math.cos(thing.turn)), np.float32(math.sin(thing.turn))
    return (rows, columns), cos * x[None, :] + sin * y[:, None], cos * y[:, None] - sin * x[None, :]


def _span(centre: float, radius: float, size: int) -> slice:
    return slice(max(0, math.floor((centre - radius) * size)), min(size, math.ceil((centre + radius) * size)))


def _samples(span: slice, centre: float, radius: float, size: int) -> _Floats:
    points = (np.arange(span.start * _FINER, span.stop * _FINER, dtype=np.float32) + 0.5) / (_FINER * size)
    return _floats((points - centre) / radius)


def _coarse(fine: NDArray[np.float32] | NDArray[np.bool_]) -> _Floats:
    height, width = fine.shape[0] // _FINER, fine.shape[1]
    # columns are added one by one: numpy sums short last axes slowly
    rows = fine.reshape(height, _FINER, width).sum(axis=1, dtype=np.float32)
    total = sum((rows[:, k::_FINER] for k in range(1, _FINER)), start=rows[:, 0::_FINER])
    return _floats(total / _FINER**2)


def _floats(values: ArrayLike) -> _Floats:
    return np.asarray(values, dtype=np.float32)


def colour_of(name: str, style: Style, difficulty: float, rng: np.random.Generator) -> tuple[_Floats, _Floats]:
    """First and second tone of a thing; the harder, the closer colours lie together."""
    grey, accent = _floats(style.grey), _floats(style.accent)
    tone = _floats(TONES[name]) * (1 - style.mix) + grey * style.mix
    tone = tone + (grey - tone) * (0.35 * difficulty)
    tone = tone + rng.uniform(-1, 1, size=3).astype(np.float32) * (0.02 + 0.06 * difficulty)
    return tone, tone + (accent - tone) * style.contrast


def shifted(pixels: _Floats, shift: float) -> _Floats:
    """Pixels seen by another camera: at shift 1 channels are mixed by a matrix and contrast is halved."""
    if shift == 0:
        return pixels
    mixed = pixels @ (np.eye(3, dtype=np.float32) * (1 - shift) + _TINT * shift)
    return np.asarray(mixed * (1 - 0.5 * shift) + _PALE * shift, dtype=np.float32)


# Shapes and textures are conditions on coordinates in the frame of a thing, whose radius is 1; u runs right, v down.


def _star(u: _Floats, v: _Floats) -> _Points:
    # a fifth of the star, folded on its axis: the edge runs from the tip (1, 0) to the notch at 36 degrees
    fifth = 2 * math.pi / 5
    angle = abs((np.arctan2(u, -v) + fifth / 2) % fifth - fifth / 2)
    radius = np.sqrt(u * u + v * v)
    notch_x, notch_y = 0.45 * math.cos(fifth / 2), 0.45 * math.sin(fifth / 2)
    x, y = radius * np.cos(angle), radius * np.sin(angle)
    return (1 - x) * notch_y > y * (1 - notch_x)


_INSIDE: dict[str, Callable[[_Floats, _Floats], _Points]] = {
    "circle": lambda u, v: u * u + v * v < 0.85,
    "square": lambda u, v: np.maximum(abs(u), abs(v)) < 0.72,
    "triangle": lambda u, v: (v < 0.5) & (v > math.sqrt(3) * abs(u) - 1),
    "star": _star,
    "cross": lambda u, v: (np.minimum(abs(u), abs(v)) < 0.3) & (np.maximum(abs(u), abs(v)) < 0.92),
    "ring": lambda u, v: (u * u + v * v < 0.95) & (u * u + v * v > 0.3),
}
_MARKED: dict[str, Callable[[_Floats, _Floats], _Points]] = {
    "plain": lambda u, v: np.zeros(np.broadcast_shapes(u.shape, v.shape), dtype=bool),
    "striped": lambda u, v: np.asarray(np.sin(8.5 * u + 0.6) > 0, dtype=bool),
    "dotted": lambda u, v: np.asarray(np.cos(8.5 * u) * np.cos(8.5 * v) > 0.35, dtype=bool),
}


def inside(shape: str, u: _Floats, v: _Floats) -> _Points:
    return _INSIDE[shape](u, v)


def marked(texture: str, u: _Floats, v: _Floats) -> _Points:
    """Which points have the second tone of the texture; none for ``plain``."""
    return _MARKED[texture](u, v)
