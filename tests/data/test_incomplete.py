"""Which rows of a table are items: wanted values and incomplete items."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from item_tables import context_of, opened, picture, table, written
from polyfed.core.errors import DataError
from polyfed.data.arrow import lacking
from polyfed.data.sources.arrow import Hub
from polyfed.data.sources.parquet import Parquet, ParquetShards
from polyfed.data.sources.questions import Questions
from polyfed.data.sources.scenes import Scenes
from polyfed.data.views.pixels import Pixels

# ---- wanted values


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ({"ok": True}, [0, 2, 3, 5]),
        ({"ok": [True, False]}, [0, 1, 2, 3, 4, 5]),
        ({"country": "Italy"}, [0, 2, 5]),
        ({"country": ["Spain", "Italy"]}, [0, 1, 2, 5]),
        ({"group": "Thorax"}, [1, 2, 4]),
        ({"group": 0}, [0, 3, 5]),
        ({"group": ["Head", 1]}, [0, 1, 2, 3, 4, 5]),
        ({"mention": 1}, [1, 3, 4]),
        ({"ok": True, "country": "Italy", "mention": 0}, [0, 2, 5]),
    ],
)
def test_items_have_the_wanted_values_in_every_column(tmp_path: Path, where: dict[str, Any], rows: list[int]) -> None:
    split = opened(written(tmp_path), where=where, targets={"group": "group"})
    whole = table()
    assert list(split.ids) == [f"k{row}" for row in rows]
    for column in whole.column_names:
        everything = whole[column].to_pylist()
        assert split.read(column).values.to_pylist() == [everything[row] for row in rows]
    assert split.left_out == {}


def test_ids_made_of_row_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    split = opened(written(tmp_path), where={"country": "Italy"}, id=None)
    assert split.ids == ("set/train:0", "set/train:2", "set/train:5")
    assert set(split.ids) < set(opened(tmp_path, id=None).ids), "an item is the same, whatever else is taken"


def test_ids_need_be_unique_among_the_items_only(tmp_path: Path) -> None:
    written(tmp_path, key=["a", "b", "a", "c", "b", "d"])
    assert opened(tmp_path, where={"group": "Head"}).ids == ("a", "c", "d")
    with pytest.raises(DataError, match="occurs 2 times"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"contry": "Italy"}, r"set/train \(source 's', where\): no column 'contry'; did you mean 'country'\?"),
        (
            {"country": "Itlay"},
            r"set/train, where\.country: no item has 'Itlay'; did you mean 'Italy'\? valid: Ger",
        ),
        ({"country": ["Italy", "France"]}, r"where\.country: no item has 'France'; valid: Germany, Italy, Spain"),
        ({"mention": 300}, r"where\.mention: no item has 300; valid: 0, 1"),
        ({"group": "Thorx"}, r"where\.group: no class 'Thorx'; did you mean 'Thorax'\? valid: Head, Thorax"),
        ({"group": 7}, r"where\.group: no item has 7; valid: Head, Thorax"),
        ({"ok": "yes"}, r"where\.ok: the column holds bool, which 'yes' is not; give true or false"),
        ({"mention": True}, r"where\.mention: the column holds int8, which true is not; give an integer"),
        ({"country": 3}, r"where\.country: the column holds string, which 3 is not; give a text"),
        ({"age": 1}, r"where\.age: the column holds double.*name a column of booleans, integers or texts"),
        ({"captions": "one 1"}, r"where\.captions: the column holds list.*name a column of booleans"),
        ({"country": "Spain", "ok": True}, r"none of 6 items fits where \{country: 'Spain', ok: True\}; ask for less"),
    ],
)
def test_values_that_do_not_fit_are_named(tmp_path: Path, where: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(written(tmp_path), where=where)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"matches": "nte"}, r"matches\): no column 'nte'; did you mean 'note'\?"),
        ({"matches": "age"}, "matches: column 'age' holds double; name one of texts or integers"),
        ({"matches": "captions"}, "matches: column 'captions' holds list"),
        ({"targets": {"y": "text"}}, "target 'y', column 'text': its texts are a modality already"),
    ],
)
def test_columns_that_cannot_be_used_so_are_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(written(tmp_path), **settings)


def test_of_very_many_values_a_few_are_shown(tmp_path: Path) -> None:
    pq.write_table(pa.table({"key": [f"item {n}" for n in range(5000)]}), _made(tmp_path) / "train.parquet")
    with pytest.raises(DataError, match=r"did you mean 'item 4999'\?") as raised:
        opened(tmp_path, columns={}, where={"key": "item 49999"})
    assert len(str(raised.value)) < 600


def test_a_value_that_only_another_split_has_is_no_mistake(tmp_path: Path) -> None:
    written(written(tmp_path), "test", country=["Italy"] * 6)
    assert len(opened(tmp_path, "test", where={"country": ["Italy", "Spain"]})) == 6
    with pytest.raises(DataError, match=r"set/test: none of 6 items fits where \{country: 'Spain'\}"):
        opened(tmp_path, "test", where={"country": "Spain"})


# ---- other sources


def test_scenes_can_be_chosen_among() -> None:
    scenes = Scenes(train=40, size=16)
    labels = scenes.open("train", name="s", data_dir=None).read("label").values.to_pylist()
    chosen = scenes.model_copy(update={"where": {"label": labels[0]}}).open("train", name="s", data_dir=None)
    assert len(chosen) == labels.count(labels[0]) < 40
    assert set(chosen.read("label").values.to_pylist()) == {labels[0]}


def test_hub_can_be_chosen_among_and_has_text_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"train": ["b", "a", "b"], "test": ["c", "b", "b"]}
    made = {name: datasets.Dataset.from_dict({"kind": kinds, "n": [0, 1, 1]}) for name, kinds in rows.items()}

    def load_dataset(path: str, name: str | None, *, split: str | None, revision: str | None) -> Any:
        return datasets.DatasetDict(made) if split is None else made[split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = Hub(repository="me/pets", targets={"y": "kind"}, where={"n": 1})
    split = hub.open("test", name="pets", data_dir=None)
    assert split.classes == {"y": ("a", "b", "c")}
    assert split.read("kind").values.to_pylist() == [1, 1]
    assert split.ids == ("me/pets/test:1", "me/pets/test:2")


def test_questions_follow_the_source_that_they_are_of(tmp_path: Path) -> None:
    written(tmp_path, captions=[["what", "who"]] * 6, tags=[["x", "y"], ["x", "z"], ["x", "y"], *[["q", "q"]] * 3])
    inner = {"name": "parquet", "path": "set", "columns": {"image": "image"}, "where": {"country": "Italy"}}
    source = Questions.model_validate({"of": inner, "question": "captions", "answers": "tags"})
    split = source.open("train", name="s", data_dir=tmp_path)
    assert len(split) == 3
    assert "z" not in split.classes["answer"]
    with pytest.raises(ValidationError, match="unknown key 'where'"):
        Questions.model_validate({"of": inner, "where": {"country": "Italy"}})


# ---- incomplete items


NO_PICTURE = {"bytes": None, "path": None}


def test_items_without_picture_text_or_target_are_left_out_and_counted(tmp_path: Path) -> None:
    pictures = [picture(1), None, NO_PICTURE, picture(4), picture(5), picture(6)]
    texts = ["a", None, "c", "\t ", "e", "f"]
    written(tmp_path, image=pictures, text=texts, mention=pa.array([0, 1, 0, 1, None, 1], pa.int8()))
    split = opened(tmp_path, incomplete="leave_out", targets={"y": "mention"})
    assert split.ids == ("k0", "k5")
    assert split.left_out == {"image": 2, "text": 2, "mention": 1}
    assert split.modality("text").values.to_pylist() == ["a", "f"]
    assert split.read("mention").values.to_pylist() == [0, 1]


def test_only_what_is_listed_must_be_there_and_only_items_that_fit_are_counted(tmp_path: Path) -> None:
    written(tmp_path, text=["a", None, "", "d", "e", "f"])
    assert len(opened(tmp_path, incomplete="leave_out", columns={"image": "image"})) == 6
    assert opened(tmp_path, incomplete="leave_out").left_out == {"text": 2}
    refused = opened(tmp_path)
    assert (len(refused), refused.left_out) == (6, {})
    italian = opened(tmp_path, incomplete="leave_out", where={"country": "Italy"})
    assert (italian.ids, italian.left_out) == (("k0", "k5"), {"text": 1})


def test_lists_lack_when_empty_or_with_a_gap() -> None:
    lists = pa.chunked_array([[["a"], [], None], [["b", None], ["c", " "], ["d", "e"]]])
    assert lacking(lists).tolist() == [False, True, True, True, True, False]
    numbers = pa.chunked_array([[1, None, 0]])
    assert lacking(numbers).tolist() == [False, True, False]
    path_only = pa.chunked_array([[{"bytes": None, "path": "a.jpg"}, {"bytes": b"", "path": None}, NO_PICTURE, None]])
    assert lacking(path_only).tolist() == [False, False, True, True]
    assert lacking(pa.chunked_array([], pa.string())).tolist() == []


def test_lists_of_labels_are_not_judged(tmp_path: Path) -> None:
    written(tmp_path, marks=pa.array([[0, 1], None, [1, 1], [0, 0], [1, 0], [0, 1]]))
    split = opened(tmp_path, incomplete="leave_out", targets={"m": "marks"})
    assert len(split) == 6
    with pytest.raises(DataError, match=r"row 1: label None is not an integer; mend or leave out the row$"):
        split.read("marks")


def test_refused_gaps_say_what_to_set(tmp_path: Path) -> None:
    written(tmp_path, mention=pa.array([0, 1, None, 1, 0, 1], pa.int8()), image=[None, *map(picture, range(5))])
    split = opened(tmp_path, targets={"y": "mention"})
    with pytest.raises(DataError, match=r"row 2: label None .*incomplete: leave_out"):
        split.read("mention")
    with pytest.raises(DataError, match=r"column 'image', row 0: no value.*incomplete: leave_out"):
        Pixels(size=8).open(split.modality("image"), "image", context_of(tmp_path))


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    written(tmp_path, text=[None] * 3 + [""] * 3)
    with pytest.raises(DataError, match=r"set/train: all 6 items are incomplete, they lack 'text' \(6\)"):
        opened(tmp_path, incomplete="leave_out")


def test_pictures_are_not_read_to_find_that_none_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, text=["a", None, "", "d", "e", "f"])
    read: list[str] = []
    original = ParquetShards.read

    def noting(shards: ParquetShards, column: str) -> pa.ChunkedArray:
        read.append(column)
        return original(shards, column)

    monkeypatch.setattr(ParquetShards, "read", noting)
    opened(tmp_path, incomplete="leave_out")
    assert "text" in read
    assert "image" not in read
    pictures = [None, *map(picture, range(5))]
    written(tmp_path, image=pictures)
    assert opened(tmp_path, incomplete="leave_out").left_out == {"image": 1}
    assert "image" in read


def test_files_without_statistics_are_read(tmp_path: Path) -> None:
    folder = _made(tmp_path)
    pq.write_table(table(image=[None, *map(picture, range(5))]), folder / "train.parquet", write_statistics=False)
    assert opened(tmp_path, incomplete="leave_out").left_out == {"image": 1}


def test_a_list_of_which_nothing_is_kept_is_a_gap(tmp_path: Path) -> None:
    captions = [["", "late"], ["early"], [], ["a", "b"], [None, "c"], ["d", ""]]
    columns = {"columns": {"image": "image", "text": "captions"}, "keep_first": {"captions": 1}}
    written(tmp_path, captions=pa.array(captions, pa.list_(pa.string())))
    assert opened(tmp_path, incomplete="leave_out", **columns).left_out == {"captions": 3}


# ---- real data


def test_medical_sets_become_usable() -> None:
    if "POLYFED_DATA" not in os.environ:
        pytest.skip("POLYFED_DATA is not set: no real data")
    data = Path(os.environ["POLYFED_DATA"])
    settings = {"columns": {"image": "image", "text": "text"}, "targets": {"finding": "covidx_label"}}
    notes = Parquet.model_validate({"path": "covid_cxr_notes", "incomplete": "leave_out", **settings})
    split = notes.open("train", name="notes", data_dir=data)
    assert split.classes == {"finding": ("COVID-19", "normal", "pneumonia_other")}
    assert split.left_out == {"text": 85, "covidx_label": 18}
    captions = Parquet(path="medpix2", where={"caption_ok": True, "modality": "CT"}, matches="text_id")
    assert 300 < len(captions.open("train", name="medpix", data_dir=data)) < 686


def _made(folder: Path) -> Path:
    (folder / "set").mkdir()
    return folder / "set"
