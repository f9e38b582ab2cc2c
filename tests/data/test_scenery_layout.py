import math
from collections import Counter
from dataclasses import replace

import pytest

from polyfed.data.scenery.layout import LABELS, RELATIONS, SHAPES, Scene, SceneRecipe, Thing, arrange, relation


def thing(x: float, y: float, **kwargs: object) -> Thing:
    return replace(Thing("circle", "red", "plain", "small", 0.1, x, y), **kwargs)


def scenes(difficulty: float, count: int = 200) -> list[Scene]:
    recipe = SceneRecipe(0, "train", count, difficulty=difficulty)
    return [arrange(recipe, index) for index in range(count)]


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
    assert relation(thing(*a), thing(*b)) == expected


def test_label_names_texture_and_shape_of_the_main_thing():
    scene = Scene((thing(0.5, 0.5, shape="ring", texture="dotted"), thing(0.1, 0.1)), (0, 1))
    assert LABELS[scene.label] == "dotted ring"
    assert len(set(LABELS)) == 18


@pytest.mark.parametrize("difficulty", [0.0, 0.5, 1.0])
def test_things_lie_inside_and_the_main_one_is_the_largest(difficulty: float):
    recipe = SceneRecipe(0, "train", 1, difficulty=difficulty)
    for scene in scenes(difficulty):
        assert 2 <= len(scene.things) <= recipe.most_things
        assert sorted(scene.depth) == list(range(len(scene.things)))
        assert all(other.radius < scene.things[0].radius for other in scene.things[1:])
        for item in scene.things:
            assert item.radius <= min(item.x, item.y, 1 - item.x, 1 - item.y) + 0.03


@pytest.mark.parametrize("difficulty", [0.0, 0.5, 1.0])
def test_no_thing_is_hidden(difficulty: float):
    for scene in scenes(difficulty):
        for i, a in enumerate(scene.things):
            for b in scene.things[:i]:
                assert math.hypot(a.x - b.x, a.y - b.y) > max(a.radius, b.radius) * 0.5


def test_siblings_share_shapes_but_not_relation_and_exchange_colours():
    recipe = SceneRecipe(0, "train", 40, difficulty=1.0)
    assert recipe.siblings == 4
    for family in range(10):
        members = [arrange(recipe, 4 * family + rank).things[:2] for rank in range(4)]
        assert len({(a.shape, a.texture, b.shape, b.texture) for a, b in members}) == 1
        assert sorted(str(relation(a, b)) for a, b in members) == sorted(RELATIONS)
        (a0, b0), (a1, b1) = members[:2]
        assert a0.colour != b0.colour
        assert (a1.colour, b1.colour) == (b0.colour, a0.colour)


def test_relations_and_shapes_are_balanced():
    drawn = scenes(0.5, 900)
    relations = Counter(relation(scene.things[0], scene.things[1]) for scene in drawn)
    assert set(relations) == set(RELATIONS)
    assert min(relations.values()) > 0.2 * 900
    shapes = Counter(scene.things[0].shape for scene in drawn)
    assert min(shapes[shape] for shape in SHAPES) > 900 / 6 * 0.6


def test_a_scene_depends_on_seed_split_and_index_only():
    base = SceneRecipe(0, "train", 10)
    assert arrange(base, 3) == arrange(replace(base, count=99, domain="night", shift=1.0, size=32), 3)
    others = [replace(base, seed=1), replace(base, split="test")]
    assert all(arrange(base, 3) != arrange(other, 3) for other in others)
    assert arrange(base, 3) != arrange(base, 4)
