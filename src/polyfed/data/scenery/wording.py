"""What people say and ask of a scene: captions, longer texts of a topic, and questions with answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from polyfed.data.scenery.layout import COLOURS, RELATIONS, SHAPES, TABLES, TEXTURES, Scene, Thing, pick, relation

CAPTIONS = 5
"""Captions of each scene."""

TOPICS = tuple(TABLES["topics"])
ANSWERS = ("yes", "no", *COLOURS, *SHAPES, *TEXTURES, *map(str, range(6)), *RELATIONS)


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
    frames = [TABLES["frames"][i] for i in rng.permutation(len(TABLES["frames"]))[:3]]
    sentences = [
        frame.format(cue=_cue(topic, difficulty, rng), a=_phrase(pick(scene.things, rng), difficulty, rng))
        for frame in frames
    ]
    sentences.append(_related(scene, difficulty, rng))
    return " ".join(f"{sentences[i]} ." for i in rng.permutation(len(sentences)))


def _cue(topic: int, difficulty: float, rng: np.random.Generator) -> str:
    if rng.random() > 0.75 - 0.3 * difficulty:
        topic = int(rng.integers(len(TOPICS)))
    cues: list[str] = TABLES["topics"][TOPICS[topic]]
    return pick(cues, rng)


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
        first, second, where = second, first, TABLES["relations"][where]["opposite"]
    pattern: str = pick(TABLES["related"], rng)
    return pattern.format(a=first, b=second, r=_word("relations", where, rng))


def _loose(scene: Scene, difficulty: float, rng: np.random.Generator) -> str:
    """One thing, some things, or how many there are; no relation."""
    first, second = (scene.things[i] for i in rng.permutation(len(scene.things))[:2])
    a, b = _phrase(first, difficulty, rng), _phrase(second, difficulty, rng)
    pattern: str = pick(TABLES["loose"], rng)
    gaps = {"left": first.x, "right": 1 - first.x, "top": first.y, "bottom": 1 - first.y}
    side = min(gaps, key=gaps.__getitem__)
    place = pick(TABLES["places"][side if gaps[side] < 0.36 else "middle"], rng)
    return pattern.format(a=a, b=b, n=TABLES["numbers"][len(scene.things)], place=place)


def _phrase(thing: Thing, difficulty: float, rng: np.random.Generator) -> str:
    """A noun phrase for a thing, with some of its attributes."""
    by_size, by_texture, by_colour = rng.random(3).tolist()
    size = _word("sizes", thing.size, rng) if by_size > 0.45 else ""
    texture = _word("textures", thing.texture, rng) if by_texture > 0.2 + 0.2 * difficulty else ""
    colour = _word("colours", thing.colour, rng) if by_colour > 0.08 + 0.15 * difficulty else ""
    noun = _word("shapes", thing.shape, rng)
    order = (size, colour, noun, texture) if texture.startswith("with") else (size, texture, colour, noun)
    return _with_article(" ".join(word for word in order if word))


def _word(table: str, name: str, rng: np.random.Generator) -> str:
    words: list[str] = TABLES[table][name]["words"]
    return pick(words, rng)


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


# ---- questions, whose answers are about equally likely


def questions(scene: Scene, rng: np.random.Generator) -> list[tuple[str, int]]:
    """Questions and the numbers of their answers, one of each type that has a clear answer."""
    asked = []
    # in this order: each draws from the same stream, so another order would give other questions
    for about in TABLES["asked"]:
        if unique := _unique(scene, about["by"]):
            thing = pick(unique, rng)
            asked.append((pick(about["words"], rng).format(_named(thing, about["by"])), getattr(thing, about["of"])))
    asked += [_count(scene, rng), _exists(scene, rng)]
    if pair := _clear_pair(scene, rng):
        a, b, where = pair
        asked.append((f"where is the {a} , seen from the {b}", where))
    if pair := _clear_pair(scene, rng):
        asked.append(_holds(*pair, rng))
    return [(words, ANSWERS.index(answer)) for words, answer in asked]


def _count(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    """Of all things, or of a shape such that every number that occurs is equally likely."""
    if rng.random() < 0.5:
        return "how many shapes are there", str(len(scene.things))
    held = Counter(thing.shape for thing in scene.things)
    number = pick(sorted({held[shape] for shape in SHAPES}), rng)
    shape = pick([shape for shape in SHAPES if held[shape] == number], rng)
    return f"how many shapes are {'crosses' if shape == 'cross' else shape + 's'}", str(number)


def _exists(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    """Half yes; half of the noes ask for a colour and a shape that are both there, but not together."""
    present, answer = {(thing.colour, thing.shape) for thing in scene.things}, "yes"
    options = sorted(present)
    if rng.random() >= 0.5:
        near = sorted({(a, b) for a, _ in present for _, b in present} - present)
        anything = [(a, b) for a in COLOURS for b in SHAPES if (a, b) not in present]
        options, answer = near if near and rng.random() < 0.5 else anything, "no"
    return f"is there {_with_article(' '.join(pick(options, rng)))}", answer


def _holds(a: str, b: str, where: str, rng: np.random.Generator) -> tuple[str, str]:
    """Half yes; half of the noes ask for the opposite relation."""
    asked, answer = where, "yes"
    if rng.random() < 0.5:
        opposite = TABLES["relations"][where]["opposite"]
        others = [other for other in RELATIONS if other != where]
        asked, answer = (opposite if rng.random() < 0.5 else pick(others, rng)), "no"
    return f"is the {a} {asked}{' of' if asked in ('left', 'right') else ''} the {b}", answer


def _named(thing: Thing, by: Sequence[str]) -> str:
    return " ".join(getattr(thing, attribute) for attribute in by)


def _unique(scene: Scene, by: Sequence[str]) -> list[Thing]:
    """The things that share some attributes with no other."""
    count = Counter(_named(thing, by) for thing in scene.things)
    return [thing for thing in scene.things if count[_named(thing, by)] == 1]


def _clear_pair(scene: Scene, rng: np.random.Generator) -> tuple[str, str, str] | None:
    """Names of two things, and where the first is, seen from the second."""
    by = ("colour", "shape")
    unique = _unique(scene, by)
    pairs = [(a, b, where) for a in unique for b in unique if a is not b and (where := relation(a, b))]
    if not pairs:
        return None
    a, b, where = pick(pairs, rng)
    return _named(a, by), _named(b, by), where
