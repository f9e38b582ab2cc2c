"""Which rows of a table are items: wanted values, gaps, right answers to each other, and caches of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from item_tables import context_of, opened, picture, table, written
from misbehaving import noted
from polyfed.core.errors import DataError
from polyfed.data.arrow import lacking
from polyfed.data.assembly import assemble, of_items
from polyfed.data.samples import Samples
from polyfed.data.sources.stored import Parquet, ParquetShards
from polyfed.data.tokenizers import Words
from polyfed.data.view import DataContext
from polyfed.data.views.pixels import Pixels
from polyfed.data.views.tokens import Tokens
from polyfed.federation.population import Population
from polyfed.runs.experiment import Experiment
from small_federations import tiny_experiment

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
    complete = table()
    assert list(split.ids) == [f"k{row}" for row in rows]
    for column in complete.column_names:
        everything = complete[column].to_pylist()
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
        ({"country": "Itlay"}, r"set/train, where\.country: no item has 'Itlay'; did you mean 'Italy'\? valid: Ger"),
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


def test_a_value_of_another_split_alone_is_accepted(tmp_path: Path) -> None:
    written(written(tmp_path), "test", country=["Italy"] * 6)
    assert len(opened(tmp_path, "test", where={"country": ["Italy", "Spain"]})) == 6
    with pytest.raises(DataError, match=r"set/test: none of 6 items fits where \{country: 'Spain'\}"):
        opened(tmp_path, "test", where={"country": "Spain"})


# ---- incomplete items


NO_PICTURE = {"bytes": None, "path": None}


def test_items_without_image_text_or_target_are_left_out_and_counted(tmp_path: Path) -> None:
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
    assert lacking(pa.chunked_array([[1, None, 0]])).tolist() == [False, True, False]
    path_only = pa.chunked_array([[{"bytes": None, "path": "a.jpg"}, {"bytes": b"", "path": None}, NO_PICTURE, None]])
    assert lacking(path_only).tolist() == [False, False, True, True]
    assert lacking(pa.chunked_array([], pa.string())).tolist() == []


def test_lists_of_labels_are_not_judged(tmp_path: Path) -> None:
    written(tmp_path, marks=pa.array([[0, 1], None, [1, 1], [0, 0], [1, 0], [0, 1]]))
    split = opened(tmp_path, incomplete="leave_out", targets={"m": "marks"})
    assert len(split) == 6
    with pytest.raises(DataError, match=r"row 1: label None is not an integer; mend or leave out the row$"):
        split.read("marks")


def test_refused_gaps_name_the_setting(tmp_path: Path) -> None:
    written(tmp_path, mention=pa.array([0, 1, None, 1, 0, 1], pa.int8()), image=[None, *map(picture, range(5))])
    split = opened(tmp_path, targets={"y": "mention"})
    with pytest.raises(DataError, match=r"row 2: label None .*incomplete: leave_out"):
        split.read("mention")
    with pytest.raises(DataError, match=r"column 'image', row 0: no value.*incomplete: leave_out"):
        Pixels(size=8).open(split.modality("image"), "image", context_of(tmp_path))


def test_images_are_not_read_to_find_that_none_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, text=["a", None, "", "d", "e", "f"])
    read = noted(monkeypatch, ParquetShards, "read", lambda shards, column: column)
    opened(tmp_path, incomplete="leave_out")
    assert "text" in read
    assert "image" not in read
    written(tmp_path, image=[None, *map(picture, range(5))])
    assert opened(tmp_path, incomplete="leave_out").left_out == {"image": 1}
    assert "image" in read


def test_files_without_statistics_are_read(tmp_path: Path) -> None:
    written(tmp_path, image=[None, *map(picture, range(5))], write_statistics=False)
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


# ---- right answers to each other


def test_items_with_equal_values_answer_each_other(tmp_path: Path) -> None:
    split = opened(written(tmp_path), matches="note", columns={"image": "image", "text": "captions"})
    views = {"image": Pixels(size=8), "text": Tokens(tokenizer=Words(), length=4)}
    samples = assemble(split, views, DataContext(tmp_path / "cache", public={"text": split.modality("text")}))
    notes = table()["note"].to_pylist()
    owners = [notes[item] if (notes[item] or " ").strip() else f"<{item}>" for item in samples.items.tolist()]
    assert samples.matches.dtype == torch.int64
    assert len(samples) == 12
    for i, mine in enumerate(owners):
        for j, other in enumerate(owners):
            assert (samples.matches[i] == samples.matches[j]).item() == (mine == other), (i, j)
    assert samples.batch(torch.tensor([0, 4])).matches.unique().numel() == 1
    assert of_items(samples, torch.tensor([2, 0])).matches.tolist() == [samples.matches[0].item()] * 4


def test_matches_default_to_the_items_and_survive_selection(tmp_path: Path) -> None:
    views = {"image": Pixels(size=8)}
    plain = assemble(opened(written(tmp_path)), views, context_of(tmp_path))
    assert plain.matches.tolist() == plain.items.tolist()
    split = opened(tmp_path, matches="group", where={"country": "Italy"})
    assert assemble(split, views, context_of(tmp_path)).matches.tolist() == [0, 1, 0]


# ---- the first rows


def test_only_the_first_rows_of_a_split_are_items(tmp_path: Path) -> None:
    written(written(tmp_path), "test")
    kept = {"first": {"train": 4}, "matches": "group"}
    assert len(opened(tmp_path, **kept).ids) == 4
    assert len(opened(tmp_path, "test", **kept).ids) == len(opened(tmp_path, "train").ids) == 6
    assert len(opened(tmp_path, **kept, where={"country": "Italy"}).ids) == 2
    assert len(opened(tmp_path, first={"train": 99}).ids) == 6
    assert len(opened(tmp_path, first={"train": 4, "validation": 2, "test": 1}).ids) == 4
    message = r"first\.trian: not a split of the source; valid are train, validation, test, .* did you mean 'train'\?"
    with pytest.raises(DataError, match=message):
        opened(tmp_path, first={"trian": 4})
    written(tmp_path, "dev")
    assert len(opened(tmp_path, "dev", first={"train": 4, "dev": 3}).ids) == 3
    assert len(opened(tmp_path, first={"train": 4, "dev": 3}).ids) == 4


# ---- targets that are not integers


def test_text_targets_are_numbered_alike_in_all_splits(tmp_path: Path) -> None:
    written(written(tmp_path), "test", finding=["normal", "covid", "covid", "pneumonia", "normal", "covid"])
    train = opened(tmp_path, targets={"y": "finding"})
    test = opened(tmp_path, "test", targets={"y": "finding"}, where={"country": "Italy"})
    assert train.classes == test.classes == {"y": ("covid", "normal", "pneumonia")}
    assert train.read("finding").values.to_pylist() == [2, 0, 2, 0, 2, 0]
    assert test.read("finding").values.to_pylist() == [1, 0, 0]


@pytest.mark.parametrize("gap", [None, " "])
def test_text_targets_with_gaps(tmp_path: Path, gap: str | None) -> None:
    written(tmp_path, finding=["b", gap, "a", "b", "a", "a"])
    refused = opened(tmp_path, targets={"y": "finding"})
    assert refused.classes == {"y": ("a", "b")}
    with pytest.raises(DataError, match=r"column 'finding', row 1: label None .*incomplete: leave_out"):
        refused.read("finding")
    split = opened(tmp_path, targets={"y": "finding"}, incomplete="leave_out")
    assert split.read("finding").values.to_pylist() == [1, 0, 1, 0, 0]
    assert split.left_out == {"finding": 1}


def test_boolean_targets_have_two_classes(tmp_path: Path) -> None:
    written(tmp_path, marks=[[True], [False, True], [], [True], [False], [True]])
    split = opened(tmp_path, targets={"y": "ok", "m": "marks"})
    assert split.classes == {"y": ("false", "true"), "m": ("false", "true")}
    assert split.read("ok").values.to_pylist() == [1, 0, 1, 1, 0, 1]
    assert split.read("marks").values.to_pylist() == [[1], [0, 1], [], [1], [0], [1]]
    samples = assemble(opened(tmp_path, targets={"y": "ok"}), {"image": Pixels(size=8)}, context_of(tmp_path))
    assert samples.targets["y"].tolist() == [1, 0, 1, 1, 0, 1]


# ---- caches


def test_the_same_items_share_their_cache_however_they_were_chosen(tmp_path: Path) -> None:
    written(tmp_path, text=["a", None, "c", "", "", "f"])
    choices = {"where": {"country": "Italy"}}, {"incomplete": "leave_out"}, {}, {"where": {"ok": [True, False]}}
    stamps = [opened(tmp_path, **settings).modality("image").fingerprint for settings in choices]
    assert stamps[0] == stamps[1] != stamps[2] == stamps[3]


def kept(folder: Path, image: Any, text: list[Any], label: list[Any] | None = None) -> Samples:
    """Samples of a table whose rows may lack what others have."""
    (folder / "set").mkdir(exist_ok=True)
    columns = {"image": image, "text": text, "label": label or list(range(len(text)))}
    pq.write_table(pa.table(columns), folder / "set" / "train.parquet")
    split = opened(folder, id=None, incomplete="keep", targets={"label": "label"})
    views = {"image": Pixels(size=8), "text": Tokens(length=4, tokenizer={"name": "hashing", "size": 50})}
    return assemble(split, {name: views[name] for name in split.columns}, context_of(folder))


def rows_of(samples: Samples) -> dict[str, list[int]]:
    return {name: own.tolist() for name, own in samples.rows.items()}


PICTURES = [picture(k) for k in range(4)]


def test_an_empty_cell_is_a_modality_that_the_item_lacks(tmp_path: Path) -> None:
    samples = kept(tmp_path, [PICTURES[0], None, PICTURES[2], None, PICTURES[3]], ["one", "two", None, " ", ""])
    # the fourth has nothing; the others are numbered by what is there
    assert rows_of(samples) == {"image": [0, -1, 1, 2], "text": [0, 1, -1, -1]}
    assert samples.targets["label"].tolist() == [0, 1, 2, 4]
    full = kept(tmp_path, PICTURES[:4], ["one", "two", "a", "b"])
    batch, other = samples.batch(torch.arange(4)), full.batch(torch.arange(4))
    assert torch.equal(batch.inputs["image"][[0, 2]], other.inputs["image"][[0, 2]])
    assert torch.equal(batch.inputs["text"][:2], other.inputs["text"][:2])
    assert batch.present["image"].tolist() == [True, False, True, True]
    assert not batch.inputs["image"][1].any()


def test_an_image_without_captions_is_one_sample_and_a_blank_caption_none(tmp_path: Path) -> None:
    samples = kept(tmp_path, [*PICTURES[:3], None], [["a", "b"], [], ["c", ""], ["d", "e"]])
    assert samples.items.tolist() == [0, 0, 1, 2, 2, 3, 3]
    assert rows_of(samples) == {"image": [0, 0, 1, 2, 2, -1, -1], "text": [0, 1, -1, 2, -1, 3, 4]}


def test_targets_are_never_missing_and_lists_fit_where_both_are_there(tmp_path: Path) -> None:
    assert rows_of(kept(tmp_path, [PICTURES[0], None], ["one", "two"], [None, 1])) == {"image": [-1], "text": [0]}
    with pytest.raises(DataError, match=r"item 0: .* hold lists of different length"):
        kept(tmp_path, [[PICTURES[0]], []], [["a", "b"], ["c"]])
    with pytest.raises(DataError, match="all 2 items are incomplete"):
        kept(tmp_path, pa.nulls(2, pa.binary()), ["", None])


def test_public_items_lack_nothing_and_clients_keep_what_they_can_read(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    cells = {
        "image": [None if k % 3 == 0 else picture(k) for k in range(30)],
        "text": ["" if k % 3 == 1 else f"text {k}" for k in range(30)],
        "label": [k % 2 for k in range(30)],
    }
    for name in ("train", "validation", "test"):
        rows = pa.table(cells | {"key": [f"{name}{k}" for k in range(30)]})
        pq.write_table(rows, tmp_path / "set" / f"{name}.parquet")
    config = tiny_experiment()
    columns = {"columns": {"image": "image", "text": "text"}, "targets": {"label": "label"}}
    source = {"name": "parquet", "path": str(tmp_path / "set"), "id": "key", "incomplete": "keep", **columns}
    config["data"]["sources"] = {"scenes": source, "private": source | {"where": {"label": 0}}}
    config["data"]["cache_dir"] = str(tmp_path / "cache")
    config["public"]["items"] = 6
    config["clients"]["image"] |= {"split": "validation"}
    cfg = Experiment.parse(config)
    population = Population(cfg.data, cfg.public, cfg.server, cfg.clients, 0)
    public = population.public_samples(population.members["paired-0"].views)
    assert public is not None
    assert not any(bool((own < 0).any()) for own in public.rows.values())
    pictures = population.train(population.members["image"])
    assert len(pictures) == 10  # of 15 items with label 0, those with an image
    assert not bool((pictures.rows["image"] < 0).any())
    held = population.holding(population.members["image"])
    assert (held["items"], held["samples"], held["unreadable"]) == (10, 10, 5)
    assert sum(held["labels"].values()) == len(held["index"]) == 10  # type: ignore[attr-defined, arg-type]
    assert "missing" not in held
    both = population.train(population.members["paired-0"])
    held = population.holding(population.members["paired-0"])
    assert held["missing"] == {name: int((both.rows[name] < 0).sum()) for name in ("image", "text")}
    assert "unreadable" not in held
    there = {tuple((both.rows[name][k] >= 0).item() for name in ("image", "text")) for k in range(len(both))}
    assert there >= {(True, False), (False, True)}


def test_missing_modalities_are_named_where_samples_must_be_complete(tmp_path: Path) -> None:
    samples = kept(tmp_path, [PICTURES[0], None], ["one", "two"])
    samples.require_all("text", "the probe")
    with pytest.raises(DataError, match="the probe: 1 of 2 samples have no 'image'; use complete ones"):
        samples.require_all("image", "the probe")


def test_an_item_without_a_list_of_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"item 1: .* empty list; fill it|item 1: .* lists of different length"):
        kept(tmp_path, PICTURES[:2], [["a"], []], [[0], []])
