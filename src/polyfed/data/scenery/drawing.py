"""How a scene looks: pixels and the mask of its main thing."""

from __future__ import annotations

import io
import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from polyfed.data.scenery.layout import Scene, Thing
from polyfed.data.scenery.palette import STYLES, Style, colour_of, shifted, vector
from polyfed.data.scenery.recipe import SceneRecipe
from polyfed.data.scenery.shapes import inside, marked

_Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Box = tuple[slice, slice]

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
    visible = np.zeros(canvas.shape[:2], dtype=np.float32)
    for number in scene.depth:
        box, alpha = _paint(canvas, scene.things[number], recipe, style, light, rng)
        visible[box] = np.maximum(visible[box], alpha) if number == 0 else visible[box] * (1 - alpha)
    canvas *= float(rng.uniform(0.9 - 0.2 * recipe.difficulty, 1.1))
    canvas += (0.015 + 0.075 * recipe.difficulty) * rng.standard_normal(canvas.shape, dtype=np.float32)
    pixels = (shifted(canvas, recipe.shift).clip(0, 1) * 255).astype(np.uint8)
    return pixels, np.where(visible >= 0.5, 255, 0).astype(np.uint8)


def png(pixels: Bytes) -> bytes:
    """Pixels as a PNG file, grey for two dimensions."""
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
    near, far = (vector(style.backgrounds[i]) for i in rng.integers(len(style.backgrounds), size=2))
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
) -> tuple[Box, _Floats]:
    """Paint one thing; returns the box that it lies in and how much of each pixel there it covers."""
    box, u, v = _local(thing, recipe.size)
    within = inside(thing.shape, u, v)
    tone, second = colour_of(thing.colour, style, recipe.difficulty, rng)
    marks = marked(thing.texture, u, v)
    if style.outline:
        core = inside(thing.shape, u / (1 - style.outline), v / (1 - style.outline))
        marks = core & ~marks if thing.texture != "plain" else core
    alpha = _coarse(within)
    second_share = _coarse(within & marks)[:, :, None]
    centre = (slice(_FINER // 2, None, _FINER),) * 2
    gleam = 1 + 0.25 * (math.cos(light) * u[centre] + math.sin(light) * v[centre])[:, :, None]
    colour = (tone * (alpha[:, :, None] - second_share) + second * second_share) * gleam
    canvas[box] = canvas[box] * (1 - alpha[:, :, None]) + colour
    return box, alpha


def _local(thing: Thing, size: int) -> tuple[Box, _Floats, _Floats]:
    """The box of pixels around a thing, and its sample points in the frame of the thing."""
    rows, columns = _span(thing.y, thing.radius, size), _span(thing.x, thing.radius, size)
    x, y = _samples(columns, thing.x, thing.radius, size), _samples(rows, thing.y, thing.radius, size)
    cos, sin = np.float32(math.cos(thing.turn)), np.float32(math.sin(thing.turn))
    return (rows, columns), cos * x[None, :] + sin * y[:, None], cos * y[:, None] - sin * x[None, :]


def _span(centre: float, radius: float, size: int) -> slice:
    return slice(max(0, math.floor((centre - radius) * size)), min(size, math.ceil((centre + radius) * size)))


def _samples(span: slice, centre: float, radius: float, size: int) -> _Floats:
    """Sample points of a span of pixels, in radii from the centre."""
    points = (np.arange(span.start * _FINER, span.stop * _FINER, dtype=np.float32) + 0.5) / (_FINER * size)
    return _floats((points - centre) / radius)


def _coarse(fine: NDArray[np.float32] | NDArray[np.bool_]) -> _Floats:
    """Means over the sample points of each pixel."""
    height, width = fine.shape[0] // _FINER, fine.shape[1]
    rows = fine.reshape(height, _FINER, width).sum(axis=1, dtype=np.float32)
    total = sum((rows[:, k::_FINER] for k in range(1, _FINER)), start=rows[:, 0::_FINER])
    return _floats(total / _FINER**2)


def _floats(values: ArrayLike) -> _Floats:
    return np.asarray(values, dtype=np.float32)
