"""How a scene sounds: a tone for each thing, so that a recording tells of it what a picture does."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from polyfed.data.scenery.layout import COLOUR_NAMES, Scene, SceneRecipe, Thing

RATE = 8000
"""Samples a second."""
_SECONDS, _TONE = 1.0, 0.4
_LOWEST, _STEP = 220.0, 2 ** (1 / 4)  # hertz, and three semitones
_GLIDE = 2.0  # semitones from the middle to the upper or lower edge
# shares of the first five harmonics, all of which lie below half the rate
TIMBRES: dict[str, tuple[float, ...]] = {
    "circle": (1.0, 0.0, 0.0, 0.0, 0.0),
    "square": (0.6, 0.0, 0.5, 0.0, 0.4),
    "triangle": (0.3, 1.0, 0.2, 0.0, 0.0),
    "star": (0.6, 0.5, 0.4, 0.35, 0.3),
    "cross": (0.5, 0.0, 1.0, 0.0, 0.0),
    "ring": (0.3, 0.0, 0.0, 1.0, 0.2),
}
_BEATS = {"plain": 0.0, "striped": 12.0, "dotted": 30.0}  # a second


def recording(scene: Scene, recipe: SceneRecipe, index: int) -> Float[np.ndarray, " n"]:
    """One second at ``RATE``, from -1 to 1.

    Colour is the pitch, shape the timbre, texture the beat and size the loudness of a tone. It begins the later the
    farther right its thing is, and glides up for one in the upper half, down for one in the lower. Noise grows with
    the difficulty; domains sound alike.
    """
    rng = recipe.stream("sound", index)
    samples = np.zeros(round(_SECONDS * RATE))
    for thing in scene.things:
        tone = _tone(thing, float(rng.uniform(-0.2, 0.2)) * recipe.difficulty)
        start = round(thing.x * (len(samples) - len(tone)))
        samples[start : start + len(tone)] += tone
    samples += rng.standard_normal(len(samples)) * (0.002 + 0.02 * recipe.difficulty)
    return np.asarray(samples / max(1.0, abs(samples).max()), dtype=np.float32)


def _tone(thing: Thing, detuned: float) -> Float[np.ndarray, " k"]:
    """A tone, out of tune by some semitones."""
    time = np.arange(round(_TONE * RATE)) / RATE
    pitch = _LOWEST * _STEP ** COLOUR_NAMES.index(thing.colour) * 2 ** (detuned / 12)
    glide = 2 ** (_GLIDE * (0.5 - thing.y) * 2 * (time / _TONE - 0.5) / 12)
    phase = 2 * np.pi * np.cumsum(pitch * glide) / RATE
    harmonics = sum(share * np.sin((k + 1) * phase) for k, share in enumerate(TIMBRES[thing.shape]))
    beat = 1 if thing.texture == "plain" else 0.5 + 0.5 * np.cos(2 * np.pi * _BEATS[thing.texture] * time)
    return np.asarray(harmonics * beat * np.sin(np.pi * time / _TONE) * 2 * thing.radius)
