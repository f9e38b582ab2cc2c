"""What people say of a scene: captions, and longer texts of a topic."""

from __future__ import annotations

import numpy as np

from polyfed.data.scenery.layout import OPPOSITE, SHAPES, Scene, Thing, relation
from polyfed.data.scenery.recipe import pick
from polyfed.data.scenery.vocabulary import (
    ALONE,
    BOTH,
    COLOUR_WORDS,
    CROWD,
    CUES,
    FRAMES,
    NUMBERS,
    PAIR,
    PLACE_WORDS,
    RELATION_WORDS,
    SHAPE_WORDS,
    SIZE_WORDS,
    TEXTURE_WORDS,
    TOPICS,
)

CAPTIONS = 5
"""Captions of each scene."""


def captions(scene: Scene, difficulty: float, rng: np.random.Generator) -> list[str]:
    """Five captions in random order, at least one with a relation; some leave things or attributes out."""
    relational = rng.random(CAPTIONS) < 0.3 + 0.5 * difficulty
    relational[0] = True
    said = [_related(scene, difficulty, rng) if tells else _loose(scene, difficulty, rng) for tells in relational]
    return [said[i] for i in rng.permutation(CAPTIONS)]


def topic(scene: Scene, rng: np.random.Generator) -> int:
    """Class number in TOPICS; every other scene has the topic that goes with the shape of its main thing."""
    usual = SHAPES.index(scene.things[0].shape)
    return usual if rng.random() < 0.5 else int(rng.integers(len(TOPICS)))


def text(scene: Scene, topic: int, difficulty: float, rng: np.random.Generator) -> str:
    """Four sentences on the scene with three cue words, each of the topic more often than of any other."""
    frames = [FRAMES[i] for i in rng.permutation(len(FRAMES))[:3]]
    told = [
        frame.format(cue=_cue(topic, difficulty, rng), a=_phrase(pick(scene.things, rng), difficulty, rng))
        for frame in frames
    ]
    told.append(_related(scene, difficulty, rng))
    return " ".join(f"{told[i]} ." for i in rng.permutation(len(told)))


def _related(scene: Scene, difficulty: float, rng: np.random.Generator) -> str:
    """Two things and the relation between them, three times in four the two main things."""
    a, b = scene.things[0], scene.things[1]
    if rng.random() < 0.25:
        a, b = (scene.things[i] for i in rng.permutation(len(scene.things))[:2])
    where = relation(a, b)
    if where is None:
        return _loose(scene, difficulty, rng)
    first, second = _phrase(a, difficulty, rng), _phrase(b, difficulty, rng)
    if rng.random() < 0.5:
        first, second, where = second, first, OPPOSITE[where]
    return pick(PAIR, rng).format(a=first, b=second, r=pick(RELATION_WORDS[where], rng))


def _loose(scene: Scene, difficulty: float, rng: np.random.Generator) -> str:
    """One thing, some things, or how many there are; no relation."""
    first, second = (scene.things[i] for i in rng.permutation(len(scene.things))[:2])
    a, b = _phrase(first, difficulty, rng), _phrase(second, difficulty, rng)
    pattern = pick((*ALONE, *BOTH, *CROWD), rng)
    return pattern.format(a=a, b=b, n=NUMBERS[len(scene.things)], place=pick(PLACE_WORDS[_place(first)], rng))


def _phrase(thing: Thing, difficulty: float, rng: np.random.Generator) -> str:
    """A noun phrase for a thing, with some of its attributes."""
    keeps = rng.random(3) > np.array([0.45, 0.2 + 0.2 * difficulty, 0.08 + 0.15 * difficulty])
    size = pick(SIZE_WORDS[thing.size], rng) if keeps[0] else ""
    texture = pick(TEXTURE_WORDS[thing.texture], rng) if keeps[1] else ""
    colour = pick(COLOUR_WORDS[thing.colour], rng) if keeps[2] else ""
    noun = pick(SHAPE_WORDS[thing.shape], rng)
    order = (size, colour, noun, texture) if texture.startswith("with") else (size, texture, colour, noun)
    words = " ".join(word for word in order if word)
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _place(thing: Thing) -> str:
    """The side of the picture that a thing is closest to, or the middle."""
    gaps = {"left": thing.x, "right": 1 - thing.x, "top": thing.y, "bottom": 1 - thing.y}
    side = min(gaps, key=lambda name: gaps[name])
    return side if gaps[side] < 0.36 else "middle"


def _cue(topic: int, difficulty: float, rng: np.random.Generator) -> str:
    if rng.random() > 0.75 - 0.3 * difficulty:
        topic = int(rng.integers(len(TOPICS)))
    return pick(CUES[TOPICS[topic]], rng)
