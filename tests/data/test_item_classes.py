"""Classes of items, groups that stay together, and items whose texts mention words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from item_tables import column_of, opened, written
from polyfed.core.errors import ConfigError, DataError, nearest
from polyfed.data.assembly import ItemClasses, item_classes, item_groups, mentioning
from polyfed.data.source import Column, Split
from polyfed.federation.population import Population
from polyfed.runs.experiment import Experiment

TRAIN = {
    "edema": pa.array([1, 0, 1, 0], pa.int8()),
    "effusion": pa.array([True, False, True, True]),
    "pneumonia": [0, 0, 1, 0],
    "country": ["Italy", None, "Spain", "Italy"],
    "stage": [3, 1, 1, 2],
    "age": [1.0, 2.0, 3.0, 4.0],
    "captions": [["a"], ["b"], ["c"], ["d"]],
    "patient": ["p1", None, "p1", None],
    "label": [2, 0, 1, 2],
}
FINDINGS = ("covid", "pneumonia")
TEST = {"country": ["Austria", "Spain"], "edema": [0, 1], "effusion": [True, True], "stage": [2, 0], "label": [1, 1]}


def split_of(columns: dict[str, object], name: str = "train", classes: bool = True, target: bool = True) -> Split:
    def read(column: str) -> Column:
        if column not in columns:
            raise DataError(f"sick/{name}: no column '{column}'; {nearest(column, columns)}")
        return Column(pa.chunked_array([columns[column]]), column, f"sick/{name}, column '{column}'")

    names = {"label": ("none", "some", "much")} if classes else {}
    ids = [str(k) for k in range(len(columns["label"]))]  # type: ignore[arg-type]
    return Split("sick", name, ids, {}, {"label": "label"} if target else {}, names, read)


def of_train(*of: str) -> ItemClasses:
    result = item_classes([split_of(TRAIN)], of, "clients.a.partition.of")
    assert result is not None
    return result[0]


def test_bits_are_summed_and_named_after_the_columns_that_are_set() -> None:
    result = of_train("edema", "effusion", "pneumonia")
    assert result.numbers.tolist() == [1 + 2, 0, 1 + 2 + 4, 2]
    assert result.numbers.dtype == torch.int64
    assert result.names == {0: "none", 2: "effusion", 3: "edema+effusion", 7: "edema+effusion+pneumonia"}
    assert result.counts(torch.tensor([0, 1, 3])) == {"none": 1, "effusion": 1, "edema+effusion": 1}
    assert result.column_counts(torch.tensor([0, 3]))["edema"] == {"0": 1, "1": 1}


def test_other_values_are_tuples_in_sorted_order_with_null_first() -> None:
    result = of_train("country", "stage")
    assert result.numbers.tolist() == [2, 0, 3, 1]
    assert [result.names[k] for k in range(4)] == [
        "country missing / stage 1", "Italy / stage 2", "Italy / stage 3", "Spain / stage 1",
    ]  # fmt: skip
    assert result.column_counts(torch.arange(4))["country"] == {"missing": 1, "Italy": 2, "Spain": 1}


def test_class_names_of_a_target_are_used() -> None:
    assert of_train("label", "edema").counts(torch.tensor([0, 2])) == {"some / edema 1": 1, "much / edema 1": 1}


@pytest.mark.parametrize(
    ("of", "names"),
    [
        (("ok", "mention", "group"), {1: "ok", 3: "ok+mention", 5: "ok+group", 6: "mention+group"}),
        (("group",), {0: "none", 1: "group"}),
        (("finding",), dict(enumerate(FINDINGS))),
        (("finding", "mention"), dict(enumerate(f"{one} / mention {k}" for one in FINDINGS for k in (0, 1)))),
    ],
)
def test_a_target_does_not_change_the_classes(tmp_path: Path, of: tuple[str, ...], names: dict[int, str]) -> None:
    written(tmp_path)
    declared = {column: column for column in ("ok", "mention", "group", "finding")}
    plain, targets = (item_classes([opened(tmp_path, targets=given)], of, "") for given in ({}, declared))
    assert plain is not None
    assert targets is not None
    assert plain[0].numbers.tolist() == targets[0].numbers.tolist()
    assert plain[0].names == targets[0].names == names


def test_without_columns_it_is_the_first_target() -> None:
    result = of_train()
    assert result.numbers.tolist() == TRAIN["label"]
    assert result.counts(torch.arange(4)) == {"none": 1, "some": 1, "much": 2}
    assert result.column_counts(torch.arange(4)) == {}
    assert item_classes([split_of(TRAIN, target=False)], (), "") is None


@pytest.mark.parametrize("of", [(), ("country",), ("stage", "edema"), ("edema", "effusion")])
def test_equal_classes_of_two_splits_have_equal_numbers(of: tuple[str, ...]) -> None:
    both = item_classes([split_of(TRAIN), split_of(TEST, "test")], of, "")
    assert both is not None
    train, test = both
    columns = of or ("label",)
    for i in range(4):
        for j in range(2):
            same = all(list(TRAIN[c])[i] == TEST[c][j] for c in columns)  # type: ignore[index]
            mine, theirs = train.numbers[i], test.numbers[j]
            values = [pa.scalar(list(TRAIN[c])[i]).as_py() == TEST[c][j] for c in columns]  # type: ignore[index]
            assert (mine == theirs) == (same or all(values))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("edma", r"clients.a.partition.of: 'edma' cannot be read: .* did you mean 'edema'\?"),
        ("age", r"'age' holds double .*column 'age'.*; needed is one whole number, truth value or text"),
        ("captions", r"'captions' holds list<"),
    ],
)
def test_columns_that_make_no_class_are_refused(column: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of_train("edema", column)


def test_items_without_a_patient_are_alone() -> None:
    first, second, third, fourth = item_groups(split_of(TRAIN), "patient", "").tolist()
    assert first == third
    assert len({first, second, fourth}) == 3
    codes = item_groups(split_of(TRAIN), "country", "").tolist()
    assert codes[0] == codes[3] != codes[2]


def test_dictionary_columns_are_texts() -> None:
    columns = TRAIN | {"country": pa.array(["b", "a", None, "b"]).dictionary_encode()}
    result = item_classes([split_of(columns)], ("country",), "")
    assert result is not None
    assert result[0].numbers.tolist() == [2, 1, 0, 2]


CAPTIONS = [["A dog runs .", "Two hot dogs"], ["a Bus"], ["busy street"], [], ["Pine trees", None]]


@pytest.mark.parametrize(
    ("words", "result"),
    [
        (["dog"], [True, False, False, False, False]),
        (["bus"], [False, True, False, False, False]),  # buses too, but not busy
        (["pine_tree"], [False, False, False, False, True]),
        (["DOG", "street"], [True, False, True, False, False]),
        (["c++"], [False] * 5),
    ],
)
def test_whole_words_singular_and_plural_in_any_case(words: list[str], result: list[bool]) -> None:
    assert mentioning(column_of(CAPTIONS), words).tolist() == result


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
    texts = some.data.split("scenes", "train").modality("text").values.to_pylist()
    mentions = [any(colour in text.split() for colour in colours for text in item) for item in texts]
    assert 0 < sum(mentions) < len(texts)
    assert some.public.items.tolist() == [k for k, result in enumerate(mentions) if not result]


def test_class_names_of_a_source_stand_for_their_words(tiny: dict[str, Any]) -> None:
    names = [name for form in federation(tiny, {}).data.split("private", "train").classes.values() for name in form]
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
def test_what_cannot_be_left_out(tiny: dict[str, Any], without: Any, items: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = federation(tiny, without, items).public.items
