"""The generator behind the source ``scenes``: contents of scenes, images, sounds, captions, texts and questions."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from polyfed.core.randomness import derive_seed
from polyfed.core.untrusted import yaml_content

VERSION = 1
"""Version of the generator; raised whenever the same recipe would give another scene, image or text."""

Domain = Literal["day", "night", "sketch"]

TABLES: dict[str, Any] = yaml_content(resources.files(__package__).joinpath("scenery.yaml").read_text("utf-8"))
"""Names of the contents of scenes, with their words, drawings and sounds."""

SHAPES, COLOURS, TEXTURES, RELATIONS = (tuple(TABLES[key]) for key in ("shapes", "colours", "textures", "relations"))
LABELS = tuple(f"{texture} {shape}" for shape in SHAPES for texture in TEXTURES)

_MARGIN = 0.02
_TRIES = 25

_T = TypeVar("_T")


def pick(options: Sequence[_T], rng: np.random.Generator) -> _T:
    return options[int(rng.integers(len(options)))]


@dataclass(frozen=True)
class SceneRecipe:
    """Settings of the n scenes of one split; scene i depends on all of them except ``count``.

    Attributes:
        seed: seed of the data set.
        split: name of the split.
        count: number of scenes, n.
        size: height and width of an image in pixels.
        difficulty: 0 (easy) to 1.
        domain: style of the images.
        shift: 0 (none) to 1, how far colours and contrast are moved away from the domain's own.
    """

    seed: int
    split: str
    count: int
    size: int = 64
    difficulty: float = 0.5
    domain: Domain = "day"
    shift: float = 0.0

    def stream(self, purpose: str, index: int) -> np.random.Generator:
        """The stream of one scene for one purpose; streams do not disturb each other."""
        return np.random.default_rng(derive_seed(self.seed, "scenes", VERSION, self.split, purpose, index))

    def scene_id(self, index: int) -> str:
        return f"scenes-{self.seed}-{self.split}-{index:06d}"

    @property
    def siblings(self) -> int:
        """Scenes in a row that show the same shapes in other colours or relations, 1 to 4."""
        return 1 + round(3 * self.difficulty)

    @property
    def most_things(self) -> int:
        """The largest number of things in a scene, 3 to 5; the smallest is 2."""
        return 3 + round(2 * self.difficulty)


@dataclass(frozen=True)
class Thing:
    """One shape of a scene; lengths are shares of the image's side, x runs right and y down.

    Attributes:
        shape: one of SHAPES.
        colour: one of COLOURS.
        texture: one of TEXTURES.
        size: size as people would call it.
        radius: radius of the circle around it.
        x: centre.
        y: centre.
        turn: rotation in radians.
    """

    shape: str
    colour: str
    texture: str
    size: str
    radius: float
    x: float = 0.5
    y: float = 0.5
    turn: float = 0.0

    @property
    def label(self) -> int:
        return SHAPES.index(self.shape) * len(TEXTURES) + TEXTURES.index(self.texture)


@dataclass(frozen=True)
class Scene:
    """The things of a scene.

    Attributes:
        things: the main thing, which is the largest, the one it is related to, and any others.
        depth: numbers of the things from the farthest to the nearest, which hides parts of the others.
    """

    things: tuple[Thing, ...]
    depth: tuple[int, ...]


def relation(a: Thing, b: Thing) -> str | None:
    """Position of ``a`` seen from ``b``; None if unclear: they lie diagonally, or too close."""
    dx, dy = a.x - b.x, a.y - b.y
    # people call a thing "left of" another only if it is clearly more left than above or below
    if max(abs(dx), abs(dy)) < max(0.1, 1.3 * min(abs(dx), abs(dy))):
        return None
    if abs(dx) > abs(dy):
        return "left" if dx < 0 else "right"
    return "above" if dy < 0 else "below"


def arrange(recipe: SceneRecipe, index: int) -> Scene:
    """Scene number ``index``.

    ``recipe.siblings`` scenes in a row share the shapes and textures of their two main things; they differ in
    the relation between them, and every other one has their colours exchanged. So a model must bind
    attributes and understand relations to distinguish siblings.
    """
    family, rank = divmod(index, recipe.siblings)
    main, second, first_relation = _family(recipe, family)
    if rank % 2:
        main, second = replace(main, colour=second.colour), replace(second, colour=main.colour)
    rng = recipe.stream("layout", index)
    placed = _related_pair(main, second, RELATIONS[(first_relation + rank) % 4], recipe.difficulty, rng)
    for _ in range(int(rng.integers(2, recipe.most_things + 1)) - 2):
        thing = _thing(_smaller(main.size, rng), int(rng.integers(len(COLOURS))), rng)
        if rng.random() < 1 / 3:  # a shape that is there already
            thing = replace(thing, shape=pick(placed, rng).shape)
        placed.append(_placed(thing, placed, recipe.difficulty, rng))
    things = []
    for thing in placed:
        # squares and crosses look the same after a quarter turn
        most = math.pi / 4 if thing.shape in ("square", "cross") else math.pi
        share = 0.15 + 0.85 * recipe.difficulty
        things.append(replace(thing, turn=_uniform(-1, 1, rng) * (share * most)))
    return Scene(tuple(things), tuple(int(i) for i in rng.permutation(len(things))))


def shown(recipe: SceneRecipe, index: int) -> Thing:
    """The main thing of scene number ``index``, except position, turn and colour: the basis of labels and topics."""
    return _family(recipe, index // recipe.siblings)[0]


@lru_cache(maxsize=4096)
def _family(recipe: SceneRecipe, number: int) -> tuple[Thing, Thing, int]:
    """Both main things that siblings share, and the number of the first sibling's relation."""
    rng = recipe.stream("family", number)
    size: str = "large" if rng.random() < 0.7 else "medium"
    main = _thing(size, int(rng.integers(len(COLOURS))), rng)
    step = int(rng.integers(1, len(COLOURS)))
    second = _thing(_smaller(size, rng), (COLOURS.index(main.colour) + step) % len(COLOURS), rng)
    return main, second, int(rng.integers(4))


def _uniform(low: float, high: float, rng: np.random.Generator) -> float:
    """The value of ``rng.uniform``, in a third of its time."""
    return low + (high - low) * rng.random()


def _thing(size: str, colour: int, rng: np.random.Generator) -> Thing:
    shape, texture = pick(SHAPES, rng), pick(TEXTURES, rng)
    return Thing(shape, COLOURS[colour], texture, size, TABLES["sizes"][size]["radius"] * _uniform(0.92, 1.1, rng))


def _smaller(size: str, rng: np.random.Generator) -> str:
    return "medium" if size == "large" and rng.random() < 0.6 else "small"


def _related_pair(main: Thing, second: Thing, where: str, difficulty: float, rng: np.random.Generator) -> list[Thing]:
    """Both things inside the image, the main one ``where`` of the second."""
    direction = TABLES["relations"][where]["direction"] * math.pi / 2
    angle = direction + _uniform(-0.55, 0.55, rng) * (0.4 + 0.6 * difficulty)
    apart = (main.radius + second.radius) * _uniform(1.05 - 0.25 * difficulty, 1.35, rng)
    dx, dy = apart * math.cos(angle), apart * math.sin(angle)
    centre = []
    for step in (dx, dy):  # both circles inside the image, with a margin
        low = max(second.radius, main.radius - step) + _MARGIN
        high = 1 - max(second.radius, main.radius + step) - _MARGIN
        centre.append(_uniform(low, high, rng) if low < high else (low + high) / 2)
    x, y = centre
    return [replace(main, x=x + dx, y=y + dy), replace(second, x=x, y=y)]


def _placed(thing: Thing, placed: list[Thing], difficulty: float, rng: np.random.Generator) -> Thing:
    """The thing where it overlaps the others least, or little enough."""
    best, least = (thing.x, thing.y), math.inf
    edge = thing.radius + _MARGIN
    # some scenes have no free place: the best of a few tries then
    for _ in range(_TRIES):
        x, y = _uniform(edge, 1 - edge, rng), _uniform(edge, 1 - edge, rng)
        overlap = max(1 - math.hypot(x - o.x, y - o.y) / (thing.radius + o.radius) for o in placed)
        if overlap < least:
            best, least = (x, y), overlap
        if least <= 0.3 * difficulty:
            break
    return replace(thing, x=best[0], y=best[1])


# ---- pixels in the style of a domain, and a tone for each thing

_Floats = NDArray[np.float32]
_Points = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
_Box = tuple[slice, slice]


@dataclass(frozen=True)
class Style:
    """Appearance of a domain; colours are red, green, blue from 0 to 1.

    Attributes:
        backgrounds: colours that a background runs between.
        clutter: darkest and lightest channel value of clutter.
        grey: Colour mixed into the tones of things.
        mix: share of that grey in a tone.
        contrast: how far the second tone of a texture goes from the first towards ``accent``.
        accent: Colour mixed into the second tone.
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


def render(scene: Scene, recipe: SceneRecipe, index: int) -> tuple[Bytes, Bytes]:
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
    """Small strokes that captions do not mention."""
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
    return _floats(sum((rows[:, k::_FINER] for k in range(1, _FINER)), start=rows[:, 0::_FINER]) / _FINER**2)


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


# ---- captions, longer texts of a topic, and questions with answers

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
    return SHAPES.index(main.shape) if rng.random() < 0.5 else int(rng.integers(len(TOPICS)))


def text(scene: Scene, topic: int, difficulty: float, rng: np.random.Generator) -> str:
    """Four sentences on the scene with three cue words, each of the topic more often than of any other."""
    # three different ones, whatever the topic: it must not show in the pattern
    sentences = [
        frame.format(cue=_cue(topic, difficulty, rng), a=_phrase(pick(scene.things, rng), difficulty, rng))
        for frame in [TABLES["frames"][i] for i in rng.permutation(len(TABLES["frames"]))[:3]]
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
    if (where := relation(a, b)) is None:
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
    """Question about the number of things, or of a shape, with every occurring number equally likely."""
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
