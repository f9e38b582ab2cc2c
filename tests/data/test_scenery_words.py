from collections import Counter, defaultdict

import numpy as np

from polyfed.data.scenery.layout import Scene, SceneRecipe, Thing, arrange, relation
from polyfed.data.scenery.questions import ANSWERS, questions
from polyfed.data.scenery.wording import (
    CAPTIONS,
    COLOUR_WORDS,
    RELATION_WORDS,
    SHAPE_WORDS,
    SIZE_WORDS,
    TEXTURE_WORDS,
    captions,
    text,
)

RECIPE = SceneRecipe(0, "train", 400)
SCENES = [arrange(RECIPE, index) for index in range(RECIPE.count)]
PAIR = Scene(
    (
        Thing("star", "red", "striped", "large", 0.2, 0.2, 0.5),
        Thing("ring", "blue", "dotted", "small", 0.1, 0.8, 0.5),
    ),
    (0, 1),
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def mentions(said: str, words: tuple[str, ...]) -> bool:
    return any(f" {word} " in f" {said} " for word in words if word)


def true_of(said: str, scene: Scene) -> bool:
    """Every attribute word of the caption belongs to some thing of the scene."""
    for field, table in (
        ("shape", SHAPE_WORDS),
        ("colour", COLOUR_WORDS),
        ("texture", TEXTURE_WORDS),
        ("size", SIZE_WORDS),
    ):
        here = {getattr(thing, field) for thing in scene.things}
        if any(mentions(said, words) for name, words in table.items() if name not in here):
            return False
    return True


def test_five_captions_that_are_true_and_short():
    for index, scene in enumerate(SCENES[:150]):
        said = captions(scene, 0.5, RECIPE.stream("captions", index))
        assert len(said) == CAPTIONS == 5
        assert all(true_of(caption, scene) for caption in said)
        assert all(1 < len(caption.split()) <= 28 for caption in said)


def test_no_word_stands_for_two_attributes():
    words = [
        set(words) - {""}
        for table in (SHAPE_WORDS, COLOUR_WORDS, SIZE_WORDS, TEXTURE_WORDS)
        for words in table.values()
    ]
    assert sum(map(len, words)) == len(set().union(*words))


def test_relations_are_told_the_right_way_round():
    told = 0
    for seed in range(150):
        for caption in captions(PAIR, 1.0, rng(seed)):
            star = min(caption.find(word) % 1000 for word in SHAPE_WORDS["star"])
            ring = min(caption.find(word) % 1000 for word in SHAPE_WORDS["ring"])
            left, right = (
                mentions(caption, RELATION_WORDS["left"]),
                mentions(caption, RELATION_WORDS["right"]),
            )
            if not (left or right):
                continue
            told += 1
            # "a R b" names a first; "next to b , R it , lies a" names it last
            subject_first = not caption.startswith("next to")
            assert left == ((star < ring) == subject_first), caption
            assert not mentions(caption, (*RELATION_WORDS["above"], *RELATION_WORDS["below"]))
    assert told > 300


def test_texts_are_true_of_the_scene():
    assert all(true_of(text(scene, 0, 0.5, rng(i)), scene) for i, scene in enumerate(SCENES[:100]))


def asked() -> list[tuple[str, str, Scene]]:
    return [
        (words, ANSWERS[answer], scene)
        for index, scene in enumerate(SCENES)
        for words, answer in questions(scene, RECIPE.stream("questions", index))
    ]


def test_answers_follow_from_the_scene():
    for words, answer, scene in asked():
        if words.startswith("is there"):
            *_, colour, shape = words.split()
            there = any((t.colour, t.shape) == (colour, shape) for t in scene.things)
            assert answer == ("yes" if there else "no")
        elif words == "how many shapes are there":
            assert answer == str(len(scene.things))
        elif words.startswith("how many"):
            shape = (
                words.split()[-1]
                .removesuffix("s")
                .removesuffix("se")
                .replace("cros", "cross")
                .replace("crosss", "cross")
            )
            assert answer == str(sum(t.shape == shape for t in scene.things)), words
        elif words.startswith("where"):
            first, second = (part.split()[-2:] for part in words.split(" , "))
            a, b = (next(t for t in scene.things if [t.colour, t.shape] == name) for name in (first, second))
            assert answer == relation(a, b)
        elif words.startswith(("what colour", "which colour")):
            assert [t.colour for t in scene.things if f" {t.shape}" in words] == [answer]
        elif "pattern" in words or "plain" in words:
            assert [t.texture for t in scene.things if f"{t.colour} {t.shape}" in words] == [answer]


def test_each_kind_is_asked_and_questions_alone_tell_little():
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for words, answer, _ in asked():
        kinds[" ".join(words.split()[:2])][answer] += 1
    assert {"what colour", "what shape", "how many", "is there", "where is", "is the"} <= set(kinds)
    guess = sum(max(count.values()) for count in kinds.values()) / sum(sum(count.values()) for count in kinds.values())
    assert guess < 0.42
    for kind, most in {"what colour": 0.25, "what shape": 0.3, "is there": 0.58, "where is": 0.34}.items():
        assert max(kinds[kind].values()) < most * sum(kinds[kind].values()), kind


def test_a_scene_of_twins_gets_only_questions_with_clear_answers():
    twins = Scene((PAIR.things[0], PAIR.things[0]), (0, 1))
    found = [words for seed in range(20) for words, _ in questions(twins, rng(seed))]
    assert found
    assert all(words.startswith(("how many", "is there")) for words in found)
