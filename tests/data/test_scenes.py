"""Generated scenes: the source, how things lie, how they are drawn, captions and questions."""

from __future__ import annotations

import io
import math
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from misbehaving import noted
from polyfed.core.errors import DataError
from polyfed.data import scenery
from polyfed.data.source import Split
from polyfed.data.sources import scenes as module
from polyfed.data.sources.scenes import ATTRIBUTES, SCHEMA, Scenes

COLUMNS = ["id", "image", "captions", "label", "text", "topic", "questions", "answers", "mask", "audio", *ATTRIBUTES]


def opened(split: str = "train", **settings: object) -> Split:
    small = {"train": 24, "validation": 6, "test": 8, **settings}
    return Scenes.model_validate(small).open(split, name="shapes", data_dir=None)


def values(split: Split, column: str) -> list:
    return split.read(column).values.to_pylist()


@pytest.mark.parametrize(("split", "count"), [("train", 24), ("validation", 6), ("test", 8)])
def test_every_column_has_a_value_for_each_item(split: str, count: int):
    data = opened(split)
    assert len(data) == count
    assert SCHEMA.names == COLUMNS
    for column in COLUMNS:
        assert len(data.read(column).values) == count
        assert data.read(column).values.type == SCHEMA.field(column).type
    assert data.source == "shapes"
    assert data.name == split


def test_labels_have_names_and_fit_them():
    data = opened(targets={"label": "label", "topic": "topic", "answer": "answers"})
    assert data.classes == {"label": scenery.LABELS, "topic": scenery.TOPICS, "answer": scenery.ANSWERS}
    assert set(values(data, "label")) <= set(range(18))
    assert set(values(data, "topic")) <= set(range(6))
    assert data.read("answers").nested


def test_images_are_drawn_only_when_they_are_read(monkeypatch: pytest.MonkeyPatch):
    drawn = noted(monkeypatch, scenery, "render", lambda scene, recipe, index: index)
    data = opened()
    for column in ("captions", "label", "text", "topic", "questions", "answers"):
        values(data, column)
    image = data.read("image")
    assert image.fingerprint
    assert not image.nested
    assert not drawn
    assert len(image.values) == len(image.values) == 24
    assert sorted(drawn) == [*range(24)]


def test_entries_of_lists_are_read_with_those_of_their_own_items_alone(monkeypatch: pytest.MonkeyPatch):
    settings = {"seed": 5, "where": {"topic": [0, 1, 2]}, "keep_first": {"captions": 3}}
    column, other = (opened(**settings).read("captions") for _ in range(2))
    flat, rows = other.flat_values().to_pylist(), np.array([8, 4, 5, 4, 0])
    module._kept.cache_clear()
    drawn = noted(monkeypatch, scenery, "captions", lambda *_: None)
    assert column.lengths.sum() == len(flat) == 3 * len(other.values)
    assert column.take(rows).to_pylist() == column.texts(rows) == [flat[row] for row in rows]
    assert column.of_items(np.array([2, 0])).to_pylist() == [other.values[2].as_py(), other.values[0].as_py()]
    assert len(drawn) == 3


def test_same_settings_give_the_same_bytes_and_fingerprints():
    first, second = opened(), opened()
    module.drawn_scene.cache_clear()
    for column in COLUMNS:
        assert first.read(column).fingerprint == second.read(column).fingerprint
        assert first.read(column).values.equals(second.read(column).values)


@pytest.mark.parametrize(
    "changed",
    [{"seed": 1}, {"size": 32}, {"difficulty": 0.6}, {"domain": "night"}, {"shift": 0.2}, {"train": 25}],
    ids=str,
)
def test_every_setting_changes_the_fingerprint_and_the_image_or_count(changed: dict[str, object]):
    base, other = opened(), opened(**changed)
    assert base.read("image").fingerprint != other.read("image").fingerprint
    assert not base.read("image").values.equals(other.read("image").values)


def test_a_larger_set_starts_with_the_smaller_one_and_domains_show_the_same_scenes():
    base, larger, sketch = opened(), opened(train=30), opened(domain="sketch", shift=0.3)
    for column in COLUMNS:
        assert values(larger, column)[:24] == values(base, column)
        assert (values(sketch, column) == values(base, column)) == (column != "image")


@pytest.mark.parametrize(
    ("split", "settings", "message"),
    [
        ("trian", {}, "source 'shapes': no split 'trian'; did you mean 'train'"),
        ("validation", {"validation": 0}, "split 'validation' is empty, as validation=0"),
        ("train", {"columns": {"text": "caption"}}, "no column 'caption'; did you mean 'captions'"),
        ("train", {"targets": {"label": "image"}}, "image"),
    ],
)
def test_errors_name_what_is_wrong_and_what_would_be_valid(split: str, settings: dict[str, object], message: str):
    with pytest.raises(DataError, match=message):
        opened(split, **settings)


def test_the_schema_loads_with_hugging_face_datasets():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features.from_arrow_schema(SCHEMA)
    assert features["label"].names == list(scenery.LABELS)
    assert features["answers"].feature.names == list(scenery.ANSWERS)
    assert isinstance(features["image"], datasets.Image)


WORDS = {
    table: {name: row["words"] for name, row in scenery.TABLES[table].items()}
    for table in ("shapes", "colours", "sizes", "textures", "relations")
}
TONES = {colour: row["tone"] for colour, row in scenery.TABLES["colours"].items()}


def thing(x: float, y: float) -> scenery.Thing:
    return scenery.Thing("circle", "red", "plain", "small", 0.1, x, y)


def scenes(difficulty: float, count: int = 200) -> list[scenery.Scene]:
    recipe = scenery.SceneRecipe(0, "train", count, difficulty=difficulty)
    return [scenery.arrange(recipe, index) for index in range(count)]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0.2, 0.5), (0.8, 0.5), "left"),
        ((0.8, 0.5), (0.2, 0.6), "right"),
        ((0.5, 0.1), (0.4, 0.9), "above"),
        ((0.5, 0.9), (0.5, 0.1), "below"),
        ((0.2, 0.2), (0.8, 0.8), None),
        ((0.5, 0.5), (0.55, 0.5), None),
    ],
)
def test_relation_by_hand(a: tuple[float, float], b: tuple[float, float], expected: str | None):
    assert scenery.relation(thing(*a), thing(*b)) == expected


@pytest.mark.parametrize("difficulty", [0.0, 0.5, 1.0])
def test_things_lie_inside_show_and_the_main_one_is_the_largest(difficulty: float):
    recipe = scenery.SceneRecipe(0, "train", 1, difficulty=difficulty)
    for scene in scenes(difficulty):
        assert 2 <= len(scene.things) <= recipe.most_things
        assert sorted(scene.depth) == list(range(len(scene.things)))
        assert all(other.radius < scene.things[0].radius for other in scene.things[1:])
        for i, a in enumerate(scene.things):
            assert a.radius <= min(a.x, a.y, 1 - a.x, 1 - a.y) + 0.03
            for b in scene.things[:i]:  # none is hidden
                assert math.hypot(a.x - b.x, a.y - b.y) > max(a.radius, b.radius) * 0.5


def test_siblings_share_shapes_but_not_relation_and_exchange_colours():
    recipe = scenery.SceneRecipe(0, "train", 40, difficulty=1.0)
    assert recipe.siblings == 4
    for family in range(10):
        members = [scenery.arrange(recipe, 4 * family + rank).things[:2] for rank in range(4)]
        assert len({(a.shape, a.texture, b.shape, b.texture) for a, b in members}) == 1
        assert sorted(str(scenery.relation(a, b)) for a, b in members) == sorted(scenery.RELATIONS)
        (a0, b0), (a1, b1) = members[:2]
        assert a0.colour != b0.colour
        assert (a1.colour, b1.colour) == (b0.colour, a0.colour)


def test_relations_and_shapes_are_balanced():
    drawn = scenes(0.5, 900)
    relations = Counter(scenery.relation(scene.things[0], scene.things[1]) for scene in drawn)
    assert set(relations) == set(scenery.RELATIONS)
    assert min(relations.values()) > 0.2 * 900
    shapes = Counter(scene.things[0].shape for scene in drawn)
    assert min(shapes[shape] for shape in scenery.SHAPES) > 900 / 6 * 0.6


def test_a_scene_depends_on_seed_split_and_index_only():
    base = scenery.SceneRecipe(0, "train", 10)
    assert scenery.arrange(base, 3) == scenery.arrange(replace(base, count=99, domain="night", shift=1.0, size=32), 3)
    others = [replace(base, seed=1), replace(base, split="test")]
    assert all(scenery.arrange(base, 3) != scenery.arrange(other, 3) for other in others)
    assert scenery.arrange(base, 3) != scenery.arrange(base, 4)


EASY = scenery.SceneRecipe(0, "train", 1, difficulty=0.0)
ONE = scenery.Scene((scenery.Thing("square", "red", "plain", "large", 0.25),), (0,))


def grid(n: int = 201) -> tuple[np.ndarray, np.ndarray]:
    line = np.linspace(-1, 1, n, dtype=np.float32)
    return np.meshgrid(line, line)


def area(points: np.ndarray) -> float:
    return float(points.mean()) * 4


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("circle", math.pi * 0.85),
        ("ring", math.pi * 0.65),
        ("square", 1.44**2),
        ("triangle", 3 * math.sqrt(3) / 4),
        ("cross", 2 * 0.6 * 1.84 - 0.6**2),
        # ten triangles between the centre, a tip at 1 and a notch at 0.45, 36 degrees apart
        ("star", 10 * 0.5 * 0.45 * math.sin(math.pi / 5)),
    ],
)
def test_shapes_have_the_area_of_the_formula(shape: str, expected: float):
    assert area(scenery.inside(shape, *grid())) == pytest.approx(expected, rel=0.03)


def test_the_mask_is_the_main_thing_and_the_image_has_its_colour():
    pixels, mask = scenery.render(ONE, EASY, 0)
    assert pixels.shape == (64, 64, 3)
    assert mask.shape == (64, 64)
    assert set(np.unique(mask)) == {0, 255}
    assert (mask > 0).mean() == pytest.approx(1.44**2 * 0.25**2, rel=0.1)
    assert pixels[mask > 0].mean(axis=0) / 255 == pytest.approx(TONES["red"], abs=0.15)


@pytest.mark.parametrize("colour", TONES)
def test_the_nearest_tone_is_the_named_one(colour: str):
    pixels, mask = scenery.render(scenery.Scene((replace(ONE.things[0], colour=colour),), (0,)), EASY, 5)
    mean = pixels[mask > 0].mean(axis=0) / 255
    # light differs from scene to scene: compare directions
    cosine = {name: mean @ np.array(tone) / np.linalg.norm(mean) / np.linalg.norm(tone) for name, tone in TONES.items()}
    assert max(cosine, key=cosine.__getitem__) == colour


def test_what_lies_in_front_is_taken_out_of_the_mask():
    front = scenery.Thing("square", "blue", "plain", "medium", 0.2, x=0.7)
    hidden = scenery.render(scenery.Scene((*ONE.things, front), (0, 1)), EASY, 0)[1]
    free = scenery.render(scenery.Scene((*ONE.things, front), (1, 0)), EASY, 0)[1]
    alone = scenery.render(ONE, EASY, 0)[1]
    assert np.array_equal(free, alone)
    assert (hidden > 0).sum() < 0.9 * (alone > 0).sum()


def test_png_is_lossless_and_images_are_reproducible():
    pixels, mask = scenery.render(ONE, EASY, 3)
    for values, mode in ((pixels, "RGB"), (mask, "L")):
        image = Image.open(io.BytesIO(scenery.png(values)))
        assert image.mode == mode
        assert np.array_equal(np.array(image), values)
    assert np.array_equal(scenery.render(ONE, EASY, 3)[0], pixels)
    assert not np.array_equal(scenery.render(ONE, EASY, 4)[0], pixels)


RECIPE = scenery.SceneRecipe(0, "train", 400)
SCENES = [scenery.arrange(RECIPE, index) for index in range(RECIPE.count)]
STAR = scenery.Thing("star", "red", "striped", "large", 0.2, 0.2, 0.5)
PAIR = scenery.Scene((STAR, scenery.Thing("ring", "blue", "dotted", "small", 0.1, 0.8, 0.5)), (0, 1))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def mentions(text: str, words: tuple[str, ...]) -> bool:
    return any(f" {word} " in f" {text} " for word in words if word)


def true_of(text: str, scene: scenery.Scene) -> bool:
    """Every attribute word of the caption belongs to some thing of the scene."""
    for field in ("shape", "colour", "texture", "size"):
        here = {getattr(thing, field) for thing in scene.things}
        if any(mentions(text, words) for name, words in WORDS[f"{field}s"].items() if name not in here):
            return False
    return True


def test_five_captions_that_are_true_and_short():
    for index, scene in enumerate(SCENES[:150]):
        text = scenery.captions(scene, 0.5, RECIPE.stream("captions", index))
        assert len(text) == scenery.CAPTIONS == 5
        assert all(true_of(caption, scene) for caption in text)
        assert all(1 < len(caption.split()) <= 28 for caption in text)


def test_no_word_stands_for_two_attributes():
    words = [set(words) - {""} for table, rows in WORDS.items() if table != "relations" for words in rows.values()]
    assert sum(map(len, words)) == len(set().union(*words))


def test_captions_state_relations_correctly():
    lines = 0
    for seed in range(150):
        for caption in scenery.captions(PAIR, 1.0, rng(seed)):
            star = min(caption.find(word) % 1000 for word in WORDS["shapes"]["star"])
            ring = min(caption.find(word) % 1000 for word in WORDS["shapes"]["ring"])
            left, right = (mentions(caption, WORDS["relations"][side]) for side in ("left", "right"))
            if not (left or right):
                continue
            lines += 1
            # "a R b" names a first; "next to b , R it , lies a" names it last
            subject_first = not caption.startswith("next to")
            assert left == ((star < ring) == subject_first), caption
            assert not mentions(caption, (*WORDS["relations"]["above"], *WORDS["relations"]["below"]))
    assert lines > 300


def asked() -> list[tuple[str, str, scenery.Scene]]:
    return [
        (words, scenery.ANSWERS[answer], scene)
        for index, scene in enumerate(SCENES)
        for words, answer in scenery.questions(scene, RECIPE.stream("questions", index))
    ]


def test_answers_follow_from_the_scene():
    for words, answer, scene in asked():
        if words.startswith("is there"):
            *_, colour, shape = words.split()
            assert answer == ("yes" if any((t.colour, t.shape) == (colour, shape) for t in scene.things) else "no")
        elif words == "how many shapes are there":
            assert answer == str(len(scene.things))
        elif words.startswith("how many"):
            shape = words.split()[-1].removesuffix("s").removesuffix("se")
            shape = shape.replace("cros", "cross").replace("crosss", "cross")
            assert answer == str(sum(t.shape == shape for t in scene.things)), words
        elif words.startswith("where"):
            first, second = (part.split()[-2:] for part in words.split(" , "))
            a, b = (next(t for t in scene.things if [t.colour, t.shape] == name) for name in (first, second))
            assert answer == scenery.relation(a, b)
        elif words.startswith(("what colour", "which colour")):
            assert [t.colour for t in scene.things if f" {t.shape}" in words] == [answer]
        elif "pattern" in words or "plain" in words:
            assert [t.texture for t in scene.things if f"{t.colour} {t.shape}" in words] == [answer]


def test_every_type_of_question_occurs_and_questions_alone_reveal_little():
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for words, answer, _ in asked():
        kinds[" ".join(words.split()[:2])][answer] += 1
    assert {"what colour", "what shape", "how many", "is there", "where is", "is the"} <= set(kinds)
    guess = sum(max(count.values()) for count in kinds.values()) / sum(sum(count.values()) for count in kinds.values())
    assert guess < 0.42
    for form, most in {"what colour": 0.25, "what shape": 0.3, "is there": 0.58, "where is": 0.34}.items():
        assert max(kinds[form].values()) < most * sum(kinds[form].values()), form


def test_a_scene_of_twins_gets_only_questions_with_clear_answers():
    twins = scenery.Scene((PAIR.things[0], PAIR.things[0]), (0, 1))
    result = [words for seed in range(20) for words, _ in scenery.questions(twins, rng(seed))]
    assert result
    assert all(words.startswith(("how many", "is there")) for words in result)
