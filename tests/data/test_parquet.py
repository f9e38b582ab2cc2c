"""Parquet files and data sets of the hub as sources."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from item_tables import in_memory
from misbehaving import raising
from polyfed.core.errors import DataError
from polyfed.data.arrow import class_names
from polyfed.data.source import Column, Split
from polyfed.data.sources.stored import Hub, Parquet

FEATURES = {
    "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    "answers": {"feature": {"names": ["no", "yes"], "_type": "ClassLabel"}, "_type": "Sequence"},
    "tags": [{"names": ["a", "b", "c"], "_type": "ClassLabel"}],
    "text": {"dtype": "string", "_type": "Value"},
}


def table(start: int = 0, rows: int = 3, **changed: list[object]) -> pa.Table:
    numbers = range(start, start + rows)
    columns = {
        "image": [{"bytes": b"image" * 400 + bytes([n]), "path": f"{n}.jpg"} for n in numbers],
        "name": [f"item {n}" for n in numbers],
        "text": [[f"text {n}", "second"] for n in numbers],
        "label": [n % 2 for n in numbers],
        "answers": [[n % 2, 1] for n in numbers],
        "tags": [[2] for _ in numbers],
    } | changed
    metadata = {b"huggingface": json.dumps({"info": {"features": FEATURES}}).encode()}
    return pa.table(columns).replace_schema_metadata(metadata)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "pets"
    data.mkdir()
    pq.write_table(table(0), data / "train-00000-of-00002.parquet")
    pq.write_table(table(3, 2), data / "train-00001-of-00002.parquet")
    pq.write_table(table(5), data / "test.parquet")
    pq.write_table(pa.table({"features": [1.0]}), data / "features-deit-tiny.parquet")
    return tmp_path


def parquet(**settings: object) -> Parquet:
    chosen = {"columns": {"photo": "image", "words": "text"}, "targets": {"label": "label"}} | settings
    return Parquet.model_validate({"path": "pets"} | chosen)


def pets(folder: Path | None, split: str = "train", **settings: object) -> Split:
    return parquet(**settings).open(split, name="pets", data_dir=folder)


def test_reads_shards_in_order(folder: Path) -> None:
    split = pets(folder, id="name")
    assert list(split.ids) == [f"item {n}" for n in range(5)]
    assert split.modality("words").values.to_pylist() == [[f"text {n}", "second"] for n in range(5)]
    assert split.read("label").values.to_pylist() == [0, 1, 0, 1, 0]
    assert [entry["path"] for entry in split.modality("photo").values.to_pylist()] == [f"{n}.jpg" for n in range(5)]
    assert split.classes == {"label": ("cat", "dog")}


def test_a_split_may_be_made_of_several(folder: Path) -> None:
    split = pets(folder, "all", id="name", splits=(both := {"all": ["test", "train"]}))
    assert list(split.ids) == [f"item {n}" for n in (5, 6, 7, 0, 1, 2, 3, 4)]
    assert [row[0] for row in split.modality("words").values.to_pylist()] == [f"text {n}" for n in (5, 6, 7, *range(5))]
    assert pets(folder, id="name", splits=both).ids == pets(folder, id="name").ids


def test_lists_are_kept_to_their_first_entries(folder: Path) -> None:
    words = pets(folder, keep_first={"text": 1}).modality("words")
    assert words.nested
    assert words.values.to_pylist() == [[f"text {n}"] for n in range(5)]
    more = pets(folder, keep_first={"text": 5}, where={"label": "dog"})
    assert more.modality("words").values.to_pylist() == [["text 1", "second"], ["text 3", "second"]]
    firsts = ({}, {"text": 1}, {"text": 2})
    assert len({pets(folder, keep_first=first).read("text").fingerprint for first in firsts}) == 3


def test_synthetic_ids_name_path_split_and_row(folder: Path) -> None:
    train = parquet().open("train", name="one", data_dir=folder)
    again = parquet().open("train", name="other", data_dir=folder)
    test = parquet().open("test", name="one", data_dir=folder)
    assert train.ids[0] == "pets/train:0"
    assert train.ids[4] == "pets/train:4"
    assert list(train.ids) == list(again.ids), "the same file under two names holds the same items"
    assert not set(train.ids) & set(test.ids)


def test_text_is_read_without_touching_image_bytes(folder: Path) -> None:
    file = folder / "pets" / "test.parquet"
    group = pq.read_metadata(file).row_group(0)
    chunks = {group.column(k).path_in_schema: group.column(k) for k in range(group.num_columns)}
    image = chunks["image.bytes"]
    start = image.dictionary_page_offset or image.data_page_offset
    content = bytearray(file.read_bytes())
    content[start : start + image.total_compressed_size] = b"\xff" * image.total_compressed_size
    file.write_bytes(content)
    split = pets(folder, "test")
    assert split.modality("words").values.to_pylist()[0] == ["text 5", "second"]
    with pytest.raises(DataError, match=r"pets/test.parquet: cannot be read as Parquet .*fetch the file again"):
        _ = split.modality("photo").values


def test_fingerprint_follows_file_and_column(folder: Path) -> None:
    split = pets(folder)
    same = parquet().open("train", name="renamed", data_dir=folder)
    assert split.modality("words").fingerprint == same.modality("words").fingerprint
    assert split.modality("words").fingerprint != split.modality("photo").fingerprint
    os.utime(folder / "pets" / "train-00001-of-00002.parquet", ns=(1, 1))
    assert split.modality("words").fingerprint != pets(folder).modality("words").fingerprint


@pytest.mark.parametrize(
    ("settings", "split", "message"),
    [
        ({"path": "cats"}, "train", r"no folder 'cats' under the data folder .*--data-dir or POLYFED_DATA"),
        ({}, "trian", r"path 'pets': no split 'trian'; did you mean 'train'\? valid: test, train"),
        ({"columns": {"p": "imaeg"}}, "train", r"pets/train .*columns\.p.*'imaeg'; did you mean 'image'\?"),
        ({"id": "nmae"}, "train", r"pets/train \(source 'pets', id\): no column 'nmae'; did you mean 'name'\?"),
        ({"targets": {"y": "lable"}}, "train", r"targets\.y\): no column 'lable'; did you mean 'label'\?"),
        ({"targets": {"y": "text"}}, "train", r"target 'y', column 'text'.* integers .* not list"),
        ({"splits": {"train": ["train", "rest"]}}, "train", r"path 'pets': no split 'rest'; .*valid: test, train"),
        ({"keep_first": {"txt": 1}}, "train", r"keep_first\): no column 'txt'; did you mean 'text'\?"),
        ({"keep_first": {"name": 1}}, "train", r"keep_first: column 'name' holds string; name one of lists"),
    ],
)
def test_errors_name_what_is_missing(folder: Path, settings: dict, split: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pets(folder, split, **settings)


def damaged(folder: Path, split: str) -> None:
    files = folder / "pets"
    if split == "train":  # two versions of a split, or a missing shard
        shutil.copy(files / "test.parquet", files / "train.parquet")
    else:
        (files / "test.parquet").write_bytes(b"not a parquet file")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda folder: pets(None),
         r"'pets' is not next to the file .*, and no data folder.*--data-dir or POLYFED_DATA"),
        (lambda folder: pets(folder, "test").read("mask"), "pets/test: no column 'mask'"),
        (lambda folder: (damaged(folder, "train"), pets(folder)), "split 'train': needs exactly"),
        (lambda folder: ((folder / "pets" / "train-00000-of-00002.parquet").unlink(), pets(folder)),
         r"needs exactly 2 file\(s\) but has train-00001-of-00002"),
        (lambda folder: (damaged(folder, "test"), pets(folder, "test")), r"pets/test\.parquet: cannot be read"),
        (lambda folder: in_memory(table(), targets={"y": "name"}), r"'y', column 'name'.* integers .* not string"),
        (lambda folder: in_memory(table(name=["b", "a", "b"]), ids="name"), "id 'b' occurs 2 times"),
        (lambda folder: in_memory(table(name=["b", None, "c"]), ids="name"), "column 'name', row 1: no id"),
    ],
)  # fmt: skip
def test_what_is_missing_or_damaged_is_named(folder: Path, use: Callable[[Path], object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        use(folder)


def test_ids_may_be_numbers() -> None:
    assert in_memory(table(label=[7, 8, 9]), ids="label").ids == ("7", "8", "9")


# ---- files whose types differ


def sharded(folder: Path, *tables: pa.Table, split: str = "train") -> Path:
    (folder / "odd").mkdir(exist_ok=True)
    for number, part in enumerate(tables):
        pq.write_table(part, folder / "odd" / f"{split}-{number:05}-of-{len(tables):05}.parquet")
    return folder


def odd(folder: Path, split: str = "train", **settings: object) -> Split:
    return parquet(**{"path": "odd", "columns": {}, "targets": {}} | settings).open(split, name="odd", data_dir=folder)


def of_type(values: list[object], form: pa.DataType) -> pa.Table:
    return pa.table({"x": pa.array(values, form)})


@pytest.mark.parametrize(
    ("first", "second", "form"),
    [
        (of_type([7, 8], pa.int64()), of_type([None], pa.null()), pa.int64()),
        (of_type([None, None], pa.null()), of_type(["a"], pa.string()), pa.string()),
        (of_type([7, 8], pa.int8()), of_type([300], pa.uint16()), pa.int32()),
        (of_type(["a", "b"], pa.string()), of_type(["c"], pa.large_string()), pa.large_string()),
        (of_type([[], [1]], pa.list_(pa.int32())), of_type([[2**40]], pa.list_(pa.int64())), pa.list_(pa.int64())),
        (of_type([[], []], pa.list_(pa.null())), of_type([["a"]], pa.list_(pa.string())), pa.list_(pa.string())),
    ],
)
def test_harmless_differences_are_joined(tmp_path: Path, first: pa.Table, second: pa.Table, form: pa.DataType) -> None:
    for tables in ((first, second), (second, first)):
        column = odd(sharded(tmp_path, *tables)).read("x")
        assert column.values.to_pylist() == [value for part in tables for value in part["x"].to_pylist()]
        assert column.values.type == form
        assert column.nested == pa.types.is_list(form)


def test_text_targets_and_chosen_values_may_differ_in_width_between_splits(tmp_path: Path) -> None:
    for split, names, values in (
        ("train", pa.array(["a", "c"]), pa.array([3, 5])),
        ("test", pa.array(["b", "a"], pa.large_string()), pa.array([7, 3], pa.int32())),
    ):
        sharded(tmp_path, pa.table({"finding": names, "x": values}), split=split)
    train, test = (odd(tmp_path, split, targets={"y": "finding"}) for split in ("train", "test"))
    assert train.classes == test.classes == {"y": ("a", "b", "c")}
    assert test.read("finding").values.to_pylist() == [1, 0]
    assert len(odd(tmp_path, "test", where={"x": [3, 5]})) == 1
    with pytest.raises(DataError, match=r"where\.x: no item has 9; valid: 3, 5, 7"):
        odd(tmp_path, where={"x": [3, 9]})
    with pytest.raises(DataError, match=r"none of 2 items fits where \{x: 7\}"):
        odd(tmp_path, where={"x": [7]})


@pytest.mark.parametrize(
    ("values", "form", "message"),
    [
        ([1.5], pa.float64(), "holds double, but train-00000-of-00002.parquet holds int64; write both"),
        (["a"], pa.string(), "holds string, but train-00000-of-00002.parquet holds int64"),
        ([[1]], pa.list_(pa.int64()), "holds list<.*>, but train-00000-of-00002.parquet holds int64"),
    ],
)
def test_types_that_differ_are_named(tmp_path: Path, values: list[object], form: pa.DataType, message: str) -> None:
    sharded(tmp_path, of_type([1], pa.int64()), of_type(values, form))
    split = odd(tmp_path)
    assert len(split) == 2, "an unused column does no harm"
    with pytest.raises(DataError, match=rf"odd/train-00001-of-00002\.parquet, column 'x': {message}"):
        _ = split.read("x").values


def test_a_column_that_only_some_files_have_is_not_filled_up_with_nulls(tmp_path: Path) -> None:
    sharded(tmp_path, of_type([1], pa.int64()), pa.table({"y": [1]}))
    with pytest.raises(DataError, match=r"train-00001-of-00002\.parquet: no column 'x', which train-00000-of-00002"):
        _ = odd(tmp_path).read("x").values


def test_values_beyond_the_common_type_are_refused(tmp_path: Path) -> None:
    sharded(tmp_path, of_type([-1], pa.int64()), of_type([2**63], pa.uint64()))
    with pytest.raises(DataError, match=r"odd, train-00000.*, train-00001.*, column x: the values do not fit one type"):
        _ = odd(tmp_path).read("x").values


def test_class_names_of_plain_sequence_and_list_features() -> None:
    expected = {"label": ("cat", "dog"), "answers": ("no", "yes"), "tags": ("a", "b", "c")}
    assert class_names(table().schema) == expected
    assert class_names(pa.schema([("label", pa.int64())])) == {}


@pytest.mark.parametrize("metadata", [b"[" * 100_000, b"{", b"[]", b'{"info": []}', b"\xff"])
def test_metadata_that_cannot_be_read_are_named(metadata: bytes) -> None:
    schema = pa.schema([("label", pa.int64())]).with_metadata({"huggingface": metadata})
    with pytest.raises(DataError, match="pets: metadata 'huggingface', with names of classes, cannot be read"):
        class_names(schema, "pets")


def test_nested_targets_are_checked_and_named() -> None:
    split = in_memory(table(), targets={"answer": "answers"})
    assert split.read("answers").nested
    assert split.classes == {"answer": ("no", "yes")}


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("label", [0, 2, 1], r"column 'label', row 1: label 2 is not in 0 to 1"),
        ("label", [0, 1, -1], r"row 2: label -1 is not in 0 to 1"),
        ("label", [None, 1, 0], r"row 0: label None"),
        ("answers", [[0], [1, 5], [0]], r"column 'answers', row 1: label 5"),
        ("answers", [[0], None, [0]], r"column 'answers', row 1: label None"),
        ("answers", [[0], [1, None], [0]], r"column 'answers', row 1: label None"),
    ],
)
def test_bad_labels_are_named(column: str, values: list, message: str) -> None:
    split = in_memory(table(**{column: values}), targets={"y": column})
    with pytest.raises(DataError, match=message):
        split.read(column)


def test_flattened_names_missing_values() -> None:
    lists = Column(pa.chunked_array([[["a", "b"], []], [["c", None]]]), "f", "here")
    with pytest.raises(DataError, match="here, row 2, entry 1: no value"):
        lists.flat_values()
    missing = Column(pa.chunked_array([[["a"], None]]), "f", "here")
    with pytest.raises(DataError, match="here, row 1: no value"):
        missing.flat_values()
    fine = Column(pa.chunked_array([[["a", "b"], []], [["c"]]]), "f", "here")
    assert fine.flat_values().to_pylist() == ["a", "b", "c"]
    places = ["here, row 0, entry 0", "here, row 0, entry 1", "here, row 2, entry 0"]
    assert [fine.place_of(row) for row in range(3)] == places


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        (["a.jpg", "captions.csv"], "raw", r"no file such as train\.parquet .*name: folder, path: FOLDER"),
        (["captions.csv"], "raw/captions.csv", r"is a file, not a folder of Parquet files; .*as Parquet first"),
    ],
)
def test_another_layout_gets_a_remedy(tmp_path: Path, files: list[str], path: str, message: str) -> None:
    (tmp_path / "raw").mkdir()
    for file in files:
        (tmp_path / "raw" / file).touch()
    with pytest.raises(DataError, match=message):
        Parquet(path=path).open("train", name="shop", data_dir=tmp_path)


def test_one_file_is_train_and_splits_may_have_the_usual_names(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "my-pets.parquet")
    alone = parquet(path="my-pets.parquet", fractions={"test": 0.4})
    assert [len(alone.open(split, name="pets", data_dir=tmp_path)) for split in ("train", "test")] == [2, 1]
    (tmp_path / "pets").mkdir()
    for count, split in enumerate(("training", "dev"), 2):
        pq.write_table(table(rows=count), tmp_path / "pets" / f"{split}.parquet")
    several = parquet(fractions={"validation": 0.4})
    assert [len(several.open(split, name="pets", data_dir=tmp_path)) for split in ("train", "validation")] == [2, 3]


PETS, ANSWERS = datasets.ClassLabel(names=["cat", "dog"]), datasets.ClassLabel(names=["no", "yes"])
HUB_FEATURES = datasets.Features({"text": datasets.Value("string"), "label": PETS, "answers": datasets.List(ANSWERS)})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of load_dataset."""
    calls = []

    def load_dataset(path: str, name: str | None, *, split: str, revision: str | None) -> datasets.Dataset:
        calls.append((path, name, split, revision))
        rows = {"text": ["one", "two", "three"], "label": [0, 1, 0], "answers": [[0], [1, 0], []]}
        return datasets.Dataset.from_dict(rows, features=HUB_FEATURES)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def hub(split: str = "train", **settings: Any) -> Split:
    source = Hub(repository="me/pets", columns={"words": "text"}, targets={"y": "label", "a": "answers"}, **settings)
    return source.open(split, name="pets", data_dir=None)


def test_reads_columns_and_class_names(asked: list[tuple[Any, ...]]) -> None:
    split = hub("validation", config="small", revision="abc", splits={"validation": "train[90%:]"})
    assert asked == [("me/pets", "small", "train[90%:]", "abc")]
    assert split.modality("words").values.to_pylist() == ["one", "two", "three"]
    assert split.read("answers").values.to_pylist() == [[0], [1, 0], []]
    assert split.classes == {"y": ("cat", "dog"), "a": ("no", "yes")}
    assert split.ids == ("me/pets/validation:0", "me/pets/validation:1", "me/pets/validation:2")


def test_selected_rows_are_respected(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    complete = datasets.load_dataset("me/pets", None, split="train", revision=None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: complete.select([2, 0]))
    split = hub(id="text")
    assert split.ids == ("three", "one")
    assert split.modality("words").values.to_pylist() == ["three", "one"]


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach the Hub"),
        datasets.exceptions.DatasetNotFoundError("Dataset 'me/pets' doesn't exist"),
        ValueError('Unknown split "train". Should be one of ["all"].'),
    ],
)
def test_what_cannot_be_loaded_is_a_data_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(datasets, "load_dataset", raising(error))
    with pytest.raises(DataError, match=r"source 'pets': cannot load 'me/pets' .*split 'train'.*'parquet'") as caught:
        hub()
    assert str(error) in str(caught.value)


def test_sends_no_telemetry(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    hub()
    assert datasets.config.HF_UPDATE_DOWNLOAD_COUNTS is False
    assert constants.HF_HUB_DISABLE_TELEMETRY is True
