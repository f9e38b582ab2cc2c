"""What one can ask of a scene; the answers to one kind of question are about equally likely."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from polyfed.data.scenery.layout import (
    COLOUR_NAMES,
    OPPOSITE,
    RELATIONS,
    SHAPES,
    TEXTURES,
    Scene,
    Thing,
    pick,
    relation,
)

ANSWERS = ("yes", "no", *COLOUR_NAMES, *SHAPES, *TEXTURES, "0", "1", "2", "3", "4", "5", *RELATIONS)

Asked = tuple[str, str] | None
_Ask = Callable[[Scene, np.random.Generator], Asked]


def questions(scene: Scene, rng: np.random.Generator) -> list[tuple[str, int]]:
    asked = [ask(scene, rng) for ask in _KINDS]
    return [(words, ANSWERS.index(answer)) for words, answer in (pair for pair in asked if pair is not None)]


def _attribute(key: Callable[[Thing], str], answer: str, *patterns: str) -> _Ask:
    """Asks for an attribute of a thing that ``key`` singles out and names."""

    def ask(scene: Scene, rng: np.random.Generator) -> Asked:
        unique = _unique(scene.things, key)
        if not unique:
            return None
        thing = pick(unique, rng)
        return pick(patterns, rng).format(key(thing)), getattr(thing, answer)

    return ask


def _name(thing: Thing) -> str:
    return f"{thing.colour} {thing.shape}"


def _count(scene: Scene, rng: np.random.Generator) -> Asked:
    """Of all things, or of a shape such that every number that occurs is equally likely."""
    if rng.random() < 0.5:
        return "how many shapes are there", str(len(scene.things))
    held = Counter(thing.shape for thing in scene.things)
    options = {shape: held[shape] for shape in SHAPES}
    number = pick(sorted(set(options.values())), rng)
    shape = pick([shape for shape, count in options.items() if count == number], rng)
    return f"how many shapes are {shape}s" if shape != "cross" else "how many shapes are crosses", str(number)


def _exists(scene: Scene, rng: np.random.Generator) -> Asked:
    """Half yes; half of the noes ask for a colour and a shape that are both there, but not together."""
    present = {(thing.colour, thing.shape) for thing in scene.things}
    if rng.random() < 0.5:
        colour, shape = pick(sorted(present), rng)
        return f"is there {_article(colour)} {colour} {shape}", "yes"
    near = sorted({(a, b) for a, _ in present for _, b in present} - present)
    anything = [(a, b) for a in COLOUR_NAMES for b in SHAPES if (a, b) not in present]
    colour, shape = pick(near if near and rng.random() < 0.5 else anything, rng)
    return f"is there {_article(colour)} {colour} {shape}", "no"


def _where(scene: Scene, rng: np.random.Generator) -> Asked:
    pair = _clear_pair(scene, rng)
    if pair is None:
        return None
    a, b, where = pair
    return f"where is the {_name(a)} , seen from the {_name(b)}", where


def _holds(scene: Scene, rng: np.random.Generator) -> Asked:
    """Half yes; half of the noes ask for the opposite relation."""
    pair = _clear_pair(scene, rng)
    if pair is None:
        return None
    a, b, where = pair
    asked, answer = where, "yes"
    if rng.random() < 0.5:
        wrong = [other for other in RELATIONS if other != where]
        asked, answer = (OPPOSITE[where] if rng.random() < 0.5 else pick(wrong, rng)), "no"
    words = f"{asked} of" if asked in ("left", "right") else asked
    return f"is the {_name(a)} {words} the {_name(b)}", answer


# in this order: each draws from the same stream, so another order would give other questions
_KINDS: tuple[_Ask, ...] = (
    _attribute(lambda thing: thing.shape, "colour", "what colour is the {}", "which colour does the {} have"),
    _attribute(lambda thing: thing.colour, "shape", "what shape is the {} thing", "what is {}"),
    _attribute(_name, "texture", "is the {} plain , striped or dotted", "what pattern has the {}"),
    _count,
    _exists,
    _where,
    _holds,
)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _unique(things: Sequence[Thing], key: Callable[[Thing], str]) -> list[Thing]:
    """The things that share ``key`` with no other."""
    count = Counter(map(key, things))
    return [thing for thing in things if count[key(thing)] == 1]


def _clear_pair(scene: Scene, rng: np.random.Generator) -> tuple[Thing, Thing, str] | None:
    unique = _unique(scene.things, _name)
    pairs = [(a, b, where) for a in unique for b in unique if a is not b and (where := relation(a, b))]
    return pick(pairs, rng) if pairs else None
