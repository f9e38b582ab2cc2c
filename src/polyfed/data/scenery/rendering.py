"""How a scene looks and sounds: pixels in the style of a domain, a mask of its main thing, a tone for each thing."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from polyfed.data.scenery.layout import COLOURS, TABLES, Scene, SceneRecipe, Thing

_Floats = NDArray[np.float32]
_Points = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
_Box = tuple[slice, slice]


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

    backgrounds: list[list[float]]
    clutter: list[float]
    grey: list[float]
    mix: float
    contrast: float
    accent: list[float]
    outline: float = 0.0


STYLES = {domain: Style(**style) for domain, style in TABLES["styles"].items()}

_TINT = np.array([[0.55, 0.35, 0.10], [0.10, 0.60, 0.30], [0.35, 0.05, 0.60]], dtype=np.float32)
_PALE = np.array([0.30, 0.24, 0.14], dtype=np.float32)
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
    darkest, lightest = style.clutter
    tones = rng.uniform(darkest, lightest, size=(count, 3)).astype(np.float32)
    for (row, column), (height, width), tone in zip(corners, extents, tones, strict=True):
        patch = canvas[row : row + height, column : column + width]
        patch += (tone - patch) * np.float32(0.6)


def _paint(
    canvas: _Floats, thing: Thing, recipe: SceneRecipe, style: Style, light: float, rng: np.random.Generator
) -> tuple[_Box, _Floats]:
    """Paint one thing; returns the box that it lies in and how much of each pixel there it covers."""
    (columns, x), (rows, y) = (_samples(centre, thing.radius, recipe.size) for centre in (thing.x, thing.y))
    cos, sin = np.float32(math.cos(thing.turn)), np.float32(math.sin(thing.turn))
    u, v = _floats(cos * x[None, :] + sin * y[:, None]), _floats(cos * y[:, None] - sin * x[None, :])
    within, marks = inside(thing.shape, u, v), _marked(thing.texture, u, v)
    tone, second = _tones(thing.colour, style, recipe.difficulty, rng)
    if style.outline:
        core = inside(thing.shape, _floats(u / (1 - style.outline)), _floats(v / (1 - style.outline)))
        # outlined things are filled with the second tone
        marks = core & ~marks if thing.texture != "plain" else core
    alpha, second_share = _coarse(within), _coarse(within & marks)[:, :, None]
    centre = (slice(_FINER // 2, None, _FINER),) * 2
    gleam = 1 + 0.25 * (math.cos(light) * u[centre] + math.sin(light) * v[centre])[:, :, None]
    colour = (tone * (alpha[:, :, None] - second_share) + second * second_share) * gleam
    box = rows, columns
    canvas[box] = canvas[box] * (1 - alpha[:, :, None]) + colour
    return box, alpha


def _samples(centre: float, radius: float, size: int) -> tuple[slice, _Floats]:
    """The pixels that a thing spans along one axis, and their sample points, seen from the thing in its radii."""
    start, stop = max(0, math.floor((centre - radius) * size)), min(size, math.ceil((centre + radius) * size))
    points = (np.arange(start * _FINER, stop * _FINER, dtype=np.float32) + 0.5) / (_FINER * size)
    return slice(start, stop), _floats((points - centre) / radius)


def _coarse(fine: _Points) -> _Floats:
    height, width = fine.shape[0] // _FINER, fine.shape[1]
    # columns are added one by one: numpy sums short last axes slowly
    rows = fine.reshape(height, _FINER, width).sum(axis=1, dtype=np.float32)
    total = sum((rows[:, k::_FINER] for k in range(1, _FINER)), start=rows[:, 0::_FINER])
    return _floats(total / _FINER**2)


def _floats(values: ArrayLike) -> _Floats:
    return np.asarray(values, dtype=np.float32)


def _tones(colour: str, style: Style, difficulty: float, rng: np.random.Generator) -> tuple[_Floats, _Floats]:
    """First and second tone of a thing; the harder, the closer colours lie together."""
    grey, accent = _floats(style.grey), _floats(style.accent)
    tone = _floats(TABLES["colours"][colour]["tone"]) * (1 - style.mix) + grey * style.mix
    tone = tone + (grey - tone) * (0.35 * difficulty)
    tone = tone + rng.uniform(-1, 1, size=3).astype(np.float32) * (0.02 + 0.06 * difficulty)
    return tone, tone + (accent - tone) * style.contrast


def shifted(pixels: _Floats, shift: float) -> _Floats:
    """Pixels seen by another camera: at shift 1 channels are mixed by a matrix and contrast is halved."""
    if shift == 0:
        return pixels
    mixed = pixels @ (np.eye(3, dtype=np.float32) * (1 - shift) + _TINT * shift)
    return np.asarray(mixed * (1 - 0.5 * shift) + _PALE * shift, dtype=np.float32)


def inside(shape: str, u: _Floats, v: _Floats) -> _Points:
    """Which points lie in a shape, in the frame of a thing, whose radius is 1; u runs right, v down."""
    match shape:
        case "circle":
            return u * u + v * v < 0.85
        case "square":
            return np.maximum(abs(u), abs(v)) < 0.72
        case "triangle":
            return (v < 0.5) & (v > math.sqrt(3) * abs(u) - 1)
        case "cross":
            return (np.minimum(abs(u), abs(v)) < 0.3) & (np.maximum(abs(u), abs(v)) < 0.92)
        case "ring":
            return (u * u + v * v < 0.95) & (u * u + v * v > 0.3)
    # a fifth of the star, folded on its axis: the edge runs from the tip (1, 0) to the notch at 36 degrees
    fifth = 2 * math.pi / 5
    angle = abs((np.arctan2(u, -v) + fifth / 2) % fifth - fifth / 2)
    radius = np.sqrt(u * u + v * v)
    notch_x, notch_y = 0.45 * math.cos(fifth / 2), 0.45 * math.sin(fifth / 2)
    x, y = radius * np.cos(angle), radius * np.sin(angle)
    return (1 - x) * notch_y > y * (1 - notch_x)


def _marked(texture: str, u: _Floats, v: _Floats) -> _Points:
    """Which points have the second tone of the texture; none for ``plain``."""
    if texture == "plain":
        return np.zeros(np.broadcast_shapes(u.shape, v.shape), dtype=bool)
    return np.asarray(np.sin(8.5 * u + 0.6) > 0 if texture == "striped" else np.cos(8.5 * u) * np.cos(8.5 * v) > 0.35)


# ---- sounds

RATE = 8000
"""Samples a second, and of a recording."""
_TONE = 0.4  # seconds
_LOWEST, _STEP = 220.0, 2 ** (1 / 4)  # hertz, and three semitones
_GLIDE = 2.0  # semitones from the middle to the upper or lower edge


def recording(scene: Scene, recipe: SceneRecipe, index: int) -> _Floats:
    """One second at ``RATE``, from -1 to 1.

    Colour is the pitch, shape the timbre, texture the beat and size the loudness of a tone. It begins the later the
    farther right its thing is, and glides up for one in the upper half, down for one in the lower. Noise grows with
    the difficulty; domains sound alike.
    """
    rng = recipe.stream("sound", index)
    samples, time = np.zeros(RATE), np.arange(round(_TONE * RATE)) / RATE
    for thing in scene.things:
        detuned = float(rng.uniform(-0.2, 0.2)) * recipe.difficulty  # semitones
        pitch = _LOWEST * _STEP ** COLOURS.index(thing.colour) * 2 ** (detuned / 12)
        glide = 2 ** (_GLIDE * (0.5 - thing.y) * 2 * (time / _TONE - 0.5) / 12)
        phase = 2 * np.pi * np.cumsum(pitch * glide) / RATE
        timbre, beats = TABLES["shapes"][thing.shape]["timbre"], TABLES["textures"][thing.texture]["beats"]
        tone = sum(share * np.sin((k + 1) * phase) for k, share in enumerate(timbre))
        tone *= 0.5 + 0.5 * np.cos(2 * np.pi * beats * time) if beats else 1
        start = round(thing.x * (len(samples) - len(time)))
        samples[start : start + len(time)] += tone * np.sin(np.pi * time / _TONE) * 2 * thing.radius
    samples += rng.standard_normal(len(samples)) * (0.002 + 0.02 * recipe.difficulty)
    return np.asarray(samples / max(1.0, abs(samples).max()), dtype=np.float32)
