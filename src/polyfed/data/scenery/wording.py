"""What people say of a scene: captions, and longer texts of a topic."""

from __future__ import annotations

import numpy as np

from polyfed.data.scenery.layout import OPPOSITE, SHAPES, Scene, Thing, pick, relation

CAPTIONS = 5
"""Captions of each scene."""

SHAPE_WORDS = {
    "circle": ("circle", "circle", "disc", "round shape"),
    "square": ("square", "square", "box", "block"),
    "triangle": ("triangle", "triangle", "wedge", "three-sided shape"),
    "star": ("star", "star", "five-pointed star", "pointed shape"),
    "cross": ("cross", "cross", "plus", "plus sign"),
    "ring": ("ring", "ring", "hoop", "donut"),
}
COLOUR_WORDS = {
    "red": ("red", "red", "crimson"),
    "orange": ("orange", "orange", "amber"),
    "yellow": ("yellow", "yellow", "golden"),
    "green": ("green", "green", "emerald"),
    "teal": ("teal", "turquoise", "cyan"),
    "blue": ("blue", "blue", "azure"),
    "purple": ("purple", "purple", "violet"),
    "pink": ("pink", "pink", "rosy"),
}
SIZE_WORDS = {
    "small": ("small", "little", "tiny"),
    "medium": ("medium", "mid-sized", "middling"),
    "large": ("large", "big", "huge"),
}
TEXTURE_WORDS = {
    "plain": ("", "plain", "solid"),
    "striped": ("striped", "with stripes", "lined"),
    "dotted": ("dotted", "with dots", "spotted"),
}
RELATION_WORDS = {
    "left": ("to the left of", "left of", "on the left side of"),
    "right": ("to the right of", "right of", "on the right side of"),
    "above": ("above", "over", "higher than"),
    "below": ("below", "under", "beneath"),
}
PLACE_WORDS = {
    "left": ("on the left", "at the left edge"),
    "right": ("on the right", "at the right edge"),
    "top": ("at the top", "in the upper part"),
    "bottom": ("at the bottom", "in the lower part"),
    "middle": ("in the middle", "near the centre"),
}
NUMBERS = ("no", "one", "two", "three", "four", "five")

PAIR = (
    "{a} {r} {b}",
    "{a} is {r} {b}",
    "there is {a} {r} {b}",
    "a picture of {a} {r} {b}",
    "someone put {a} {r} {b}",
    "next to {b} , {r} it , lies {a}",
)
BOTH = ("{a} and {b}", "{a} together with {b}", "an image that shows {a} and {b}")
ALONE = ("{a}", "{a} {place}", "there is {a} {place} of the picture")
CROWD = ("{n} shapes , one of them {a}", "{a} among {n} shapes", "{n} things such as {a} and {b}")

TOPICS = ("art", "game", "lesson", "market", "nature", "traffic")
CUES = {
    "art": ("painting", "gallery", "canvas", "museum", "sculpture", "brush", "collage", "artist"),
    "game": ("puzzle", "player", "board", "token", "dice", "level", "score", "match"),
    "lesson": ("teacher", "exercise", "geometry", "pupil", "school", "homework", "proof", "exam"),
    "market": ("price", "shop", "sale", "customer", "label", "stall", "discount", "goods"),
    "nature": ("garden", "flower", "river", "leaf", "meadow", "bird", "forest", "shore"),
    "traffic": ("road", "driver", "signal", "crossing", "lorry", "lane", "station", "bicycle"),
}
FRAMES = (
    "this comes from the {cue} and has {a}",
    "the {cue} made me think of {a}",
    "you could say {cue} when you look at {a}",
    "{a} was found by the {cue}",
    "for the {cue} we need {a}",
    "they talked about the {cue} and then about {a}",
    "between {a} and the {cue} there is no room",
    "{a} looks like part of the {cue}",
)


def captions(scene: Scene, difficulty: float, rng: np.random.Generator) -> list[str]:
    """Five captions in random order, at least one with a relation; some leave things or attributes out."""
    relational = rng.random(CAPTIONS) < 0.3 + 0.5 * difficulty
    # retrieval must have something to go by in every scene
    relational[0] = True
    sentences = [_related(scene, difficulty, rng) if one else _loose(scene, difficulty, rng) for one in relational]
    return [sentences[i] for i in rng.permutation(CAPTIONS)]


def topic(main: Thing, rng: np.random.Generator) -> int:
    """Class number in TOPICS; every other scene has the topic that goes with the shape of its main thing."""
    by_shape = SHAPES.index(main.shape)
    return by_shape if rng.random() < 0.5 else int(rng.integers(len(TOPICS)))


def text(scene: Scene, topic: int, difficulty: float, rng: np.random.Generator) -> str:
    """Four sentences on the scene with three cue words, each of the topic more often than of any other."""
    # three different ones, whatever the topic: it must not be told by the pattern
    frames = [FRAMES[i] for i in rng.permutation(len(FRAMES))[:3]]
    sentences = [
        frame.format(cue=_cue(topic, difficulty, rng), a=_phrase(pick(scene.things, rng), difficulty, rng))
        for frame in frames
    ]
    sentences.append(_related(scene, difficulty, rng))
    return " ".join(f"{sentences[i]} ." for i in rng.permutation(len(sentences)))


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
    by_size, by_texture, by_colour = rng.random(3).tolist()
    size = pick(SIZE_WORDS[thing.size], rng) if by_size > 0.45 else ""
    texture = pick(TEXTURE_WORDS[thing.texture], rng) if by_texture > 0.2 + 0.2 * difficulty else ""
    colour = pick(COLOUR_WORDS[thing.colour], rng) if by_colour > 0.08 + 0.15 * difficulty else ""
    noun = pick(SHAPE_WORDS[thing.shape], rng)
    order = (size, colour, noun, texture) if texture.startswith("with") else (size, texture, colour, noun)
    words = " ".join(word for word in order if word)
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _place(thing: Thing) -> str:
    gaps = {"left": thing.x, "right": 1 - thing.x, "top": thing.y, "bottom": 1 - thing.y}
    side = min(gaps, key=lambda name: gaps[name])
    return side if gaps[side] < 0.36 else "middle"


def _cue(topic: int, difficulty: float, rng: np.random.Generator) -> str:
    if rng.random() > 0.75 - 0.3 * difficulty:
        topic = int(rng.integers(len(TOPICS)))
    return pick(CUES[TOPICS[topic]], rng)
