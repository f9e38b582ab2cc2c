"""Colours: the tones of things and backgrounds in each domain, and the numeric domain shift."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyfed.data.scenery.recipe import Domain

_Floats = NDArray[np.float32]
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


def vector(rgb: Rgb) -> _Floats:
    """A colour as an array of 3."""
    return np.array(rgb, dtype=np.float32)


def colour_of(name: str, style: Style, difficulty: float, rng: np.random.Generator) -> tuple[_Floats, _Floats]:
    """First and second tone of a thing; the harder, the closer colours lie together."""
    grey, accent = vector(style.grey), vector(style.accent)
    tone = vector(TONES[name]) * (1 - style.mix) + grey * style.mix
    tone = tone + (grey - tone) * (0.35 * difficulty)
    tone = tone + rng.uniform(-1, 1, size=3).astype(np.float32) * (0.02 + 0.06 * difficulty)
    return tone, tone + (accent - tone) * style.contrast


def shifted(pixels: _Floats, shift: float) -> _Floats:
    """Pixels seen by another camera: at shift 1 channels are mixed by a matrix and contrast is halved."""
    if shift == 0:
        return pixels
    mixed = pixels @ (np.eye(3, dtype=np.float32) * (1 - shift) + _TINT * shift)
    return np.asarray(mixed * (1 - 0.5 * shift) + _PALE * shift, dtype=np.float32)
