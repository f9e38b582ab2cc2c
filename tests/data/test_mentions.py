"""Items whose texts mention words."""

from __future__ import annotations

from typing import Any

import pytest

from item_tables import column_of
from polyfed.core.errors import ConfigError
from polyfed.data.item_classes import mentioning
from polyfed.federation.population import Population
from polyfed.runs.experiment import Experiment

CAPTIONS = [["A dog runs .", "Two hot dogs"], ["a Bus"], ["busy street"], [], ["Pine trees", None]]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["dog"], [True, False, False, False, False]),
        (["bus"], [False, True, False, False, False]),  # buses too, but not busy
        (["pine_tree"], [False, False, False, False, True]),
        (["DOG", "street"], [True, False, True, False, False]),
        (["c++"], [False] * 5),
    ],
)
def test_whole_words_singular_and_plural_in_any_case(words: list[str], found: list[bool]) -> None:
    assert mentioning(column_of(CAPTIONS), words).tolist() == found


def test_plain_texts_and_other_columns() -> None:
    assert mentioning(column_of(["buses stop", None]), ["bus"]).tolist() == [True, False]
    with pytest.raises(ConfigError, match=r"'x'.* int64"):
        mentioning(column_of([1, 2]), ["bus"])


def test_no_words_are_never_mentioned_and_blank_ones_are_refused() -> None:
    assert mentioning(column_of(CAPTIONS), []).tolist() == [False] * 5
    for blank in ("", " ", "_"):
        with pytest.raises(ConfigError, match="blank"):
            mentioning(column_of(CAPTIONS), ["dog", blank])


def federation(tiny: dict[str, Any], without: dict[str, list[str]], items: int | None = None) -> Population:
    tiny["public"] = {"source": "scenes", "items": items, "without": without}
    cfg = Experiment.parse(tiny)
    return Population(cfg.data, cfg.public, cfg.server, cfg.clients, cfg.run.seed)


def test_the_public_set_is_without_what_it_must_not_mention(tiny: dict[str, Any]) -> None:
    colours = ["red", "green"]
    some = federation(tiny, {"text": colours})
    split = some.data.split("scenes", "train")
    texts = split.modality("text").values.to_pylist()
    mentions = [any(colour in text.split() for colour in colours for text in item) for item in texts]
    assert 0 < sum(mentions) < len(texts)
    assert some.public.items.tolist() == [k for k, found in enumerate(mentions) if not found]


def test_class_names_of_a_source_stand_for_their_words(tiny: dict[str, Any]) -> None:
    names = [name for kind in federation(tiny, {}).data.split("private", "train").classes.values() for name in kind]
    by_source, by_words = federation(tiny, {"text": ["@private"]}), federation(tiny, {"text": names})
    assert by_source.public.items.tolist() == by_words.public.items.tolist()


@pytest.mark.parametrize(
    ("without", "items", "message"),
    [
        ({"sound": ["dog"]}, None, "public.without: 'scenes' has no 'sound'"),
        ({"text": ["@nowhere"]}, None, "source 'nowhere' is not in data.sources"),
        ({"text": ["red", "a"]}, 40, "left by public.without; lower it"),
    ],
)
def test_what_cannot_be_left_out(
    tiny: dict[str, Any], without: dict[str, list[str]], items: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = federation(tiny, without, items).public.items
