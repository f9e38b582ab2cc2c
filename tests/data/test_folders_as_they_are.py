"""Folders as people have them: files that are not read, classes called like splits, masks beside pictures, roles."""

from __future__ import annotations

import re
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from polyfed.core.errors import DataError
from polyfed.data.preparation import ColumnRoles, prepare_folder
from polyfed.data.sources.folder import Folder
from polyfed.data.sources.parquet import Parquet
from polyfed.runs.experiment import Experiment
from polyfed.runs.starter import StarterEncoders

Cli = Callable[..., tuple[int, str, str]]


def pictures(folder: Path, *names: str, kind: str | None = None) -> Path:
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(path, kind)
    return folder


def labels(folder: Path) -> dict[str, Any]:
    table = Folder(path=str(folder)).content()
    rows = table.rows.to_pydict()
    return {
        path: (split, label) for path, split, label in zip(rows["file_name"], table.splits, rows["label"], strict=True)
    }


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (
            "train/large_vehicles/train/1.png train/bus/2.png test/large_vehicles/train/3.png test/bus/4.png",
            "train:train train:bus test:train test:bus",
        ),
        ("train/train/1.png train/bus/2.png test/train/3.png", "train:train train:bus test:train"),
        ("bus/1.png car/2.png train/3.png", "train:bus train:car train:train"),
        ("valid/1.png test_strip/2.png", "train:valid train:test_strip"),
        ("crash_test_dummy/1.png cat/2.png", "train:crash_test_dummy train:cat"),
        ("train/crash_test_dummy/1.png val2/cat/2.png", "train:crash_test_dummy validation:cat"),
        ("cat/train/1.png cat/test/2.png dog/train/3.png", "train:cat test:cat train:dog"),
        ("all/training_set/cat/1.png all/test_set/cat/2.png", "train:cat test:cat"),
    ],
)
def test_the_split_is_the_outermost_folder_and_the_label_the_innermost(tmp_path: Path, paths: str, found: str) -> None:
    told = labels(pictures(tmp_path / "data", *paths.split()))
    assert " ".join(f"{split}:{label}" for split, label in (told[path] for path in paths.split())) == found


def test_folders_of_splits_without_classes_say_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\('test_images' is taken for a split\); .* folders of their classes"):
        labels(pictures(tmp_path / "data", "train_images/1.png", "test_images/1.png"))


def test_files_that_are_not_read_are_listed_and_what_pillow_reads_is_read(cli: Cli, tmp_path: Path) -> None:
    folder = pictures(tmp_path / "data", *(f"{name}/{k}.png" for name in "ab" for k in range(10)))
    pictures(folder, "a/x.jfif", kind="JPEG")
    pictures(folder, "b/x.jp2", kind="JPEG2000")
    for name in ("a/1.dcm", "a/2.DCM", "b/scan", "notes.txt"):
        (folder / name).write_bytes(b"x")
    table = Folder(path=str(folder)).content()
    assert {path for path in table.rows["file_name"].to_pylist() if "x" in path} == {"a/x.jfif", "b/x.jp2"}
    assert table.unread == {".dcm": 2, "without ending": 1, ".txt": 1}
    code, out, err = cli("prepare", folder, tmp_path / "out")
    assert (code, err) == (0, "")
    assert "files that are not read, by ending" in out
    assert ".dcm: 2" in out


def test_a_file_that_is_there_and_not_read_is_no_missing_one(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "data", "a.png")
    (folder / "b.dcm").write_bytes(b"x")
    (folder / "captions.csv").write_text("file_name,caption\na.png,x\nb.dcm,y\n")
    with pytest.raises(DataError, match=r"'b.dcm' \(there, but .dcm is not read; convert it\)"):
        Folder(path=str(folder)).content()
    assert Folder(path=str(folder), incomplete="leave_out").content().without_picture == (
        "b.dcm (there, but .dcm is not read; convert it)",
    )


# ---- masks


@pytest.mark.parametrize(
    ("images", "masks"), [("images/{}.jpg", "masks/{}.png"), ("train/img/{}.jpg", "train/gt/{}_gt.png")]
)
def test_folders_of_masks_are_no_classes(tmp_path: Path, images: str, masks: str) -> None:
    names = [form.format(k) for k in range(4) for form in (images, masks)]
    folder = pictures(tmp_path / "data", *names)
    with pytest.raises(DataError, match=r"called as those of 'im.*name masks in a metadata.csv"):
        Folder(path=str(folder)).content()
    rows = "".join(f"{images.format(k)},{masks.format(k)}\n" for k in range(4))
    (folder / "metadata.csv").write_text(f"file_name,mask\n{rows}")
    assert Folder(path=str(folder)).content().unused == ()
    prepare_folder(Folder(path=str(folder)), tmp_path / "out")
    train = Parquet(path=str(tmp_path / "out")).table("train", name="mine", data_dir=None)
    assert train.read("mask")[0]["bytes"].as_py()[1:4] == b"PNG"


def test_a_column_of_paths_of_pictures_opens_as_pictures(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "data", "p/1.png", "p/2.png", "m/1.png")
    (folder / "metadata.csv").write_text("file_name,mask,text\np/1.png,m/1.png,see a.png\np/2.png,,p/2\n")
    rows = Folder(path=str(folder)).content().rows
    assert rows["mask"].to_pylist() == [{"bytes": None, "path": "m/1.png"}, None]
    assert ColumnRoles.of(rows) == ColumnRoles("image", "text", None)
    (folder / "metadata.csv").write_text("file_name,mask\np/1.png,m/1.png\np/2.png,m/7.png\n")
    with pytest.raises(DataError, match=r"column 'mask': there is no picture 'm/7.png'"):
        Folder(path=str(folder)).content()


# ---- roles and labels


@pytest.mark.parametrize("name", ["caption", "Captions", "text", "report", "findings", "impression", "sentence"])
def test_texts_that_repeat_are_no_labels(name: str) -> None:
    table = pa.table({name: ["no finding", "a nodule"] * 30})
    assert ColumnRoles.of(table) == ColumnRoles(None, name, None)
    assert ColumnRoles.of(table.append_column("site", pa.array(["x", "y"] * 30))).text == name


@pytest.mark.parametrize(
    ("train", "test", "classes", "numbers"),
    [
        ([3, 40, 2_000_000], [40, 40], ("3", "40", "2000000"), [1, 1]),
        ([1, 2, 3], [3, 1], ("1", "2", "3"), [2, 0]),
        ([1, 3], [2, 2], ("1", "2", "3"), [1, 1]),
        ([0, 1, 2], [2, 0], (), [2, 0]),
        ([0, 1, 5], [5, 0], (), [5, 0]),
        ([1, 1], [1, 1], (), [1, 1]),
    ],
)
def test_codes_of_classes_are_numbered_densely_alike_in_all_splits(
    tmp_path: Path, train: list[int], test: list[int], classes: tuple[str, ...], numbers: list[int]
) -> None:
    for name, values in (("train", train), ("test", test)):
        pq.write_table(pa.table({"label": pa.array(values, pa.int32())}), tmp_path / f"{name}.parquet")
    split = Parquet(path=str(tmp_path), targets={"label": "label"}).open("test", name="mine", data_dir=None)
    assert split.classes.get("label", ()) == classes
    assert split.read("label").values.to_pylist() == numbers


def test_categories_and_views_are_texts_and_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    texts = pa.array(["a", "b", "a"])
    columns = {
        "text": texts.cast(pa.string_view()),
        "label": texts.dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    source = Parquet(path=str(tmp_path), columns={"text": "text"}, targets={"label": "label"})
    split = source.open("train", name="mine", data_dir=None)
    assert split.modality("text").texts() == ["a", "b", "a"]
    assert (split.classes["label"], split.read("label").values.to_pylist()) == (("a", "b"), [0, 1, 0])
    pq.write_table(pa.Table.from_arrays([texts, texts], names=["x", "x"]), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"train.parquet: two columns are called 'x'"):
        source.open("train", name="mine", data_dir=None)


def test_every_table_draws_splits_that_it_lacks(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [f"text {k % 20}" for k in range(60)]}), tmp_path / "train.parquet")
    source = Parquet(path=str(tmp_path), fractions={"validation": 0.1, "test": 0.25}, columns={"text": "text"})
    parts = [
        source.open(split, name="mine", data_dir=None).modality("text").texts()
        for split in ("train", "validation", "test")
    ]
    assert [len(part) for part in parts] == [39, 6, 15]
    assert len(set.union(*map(set, parts))) == sum(len(set(part)) for part in parts) == 20
    pq.write_table(pa.table({"text": ["a test"]}), tmp_path / "test.parquet")
    assert len(source.open("test", name="mine", data_dir=None)) == 1


# ---- what prepare and init say before anything is written


def test_a_sample_and_classes_that_a_split_lacks_are_shown(cli: Cli, tmp_path: Path) -> None:
    rows = "".join(f"{name}{k}.png,{name} of {k},{name},{split}\n" for k, (name, split) in enumerate(SPLIT_CLASSES))
    folder = pictures(tmp_path / "data", *(f"{name}{k}.png" for k, (name, _) in enumerate(SPLIT_CLASSES)))
    (folder / "labels.csv").write_text("file_name,title,label,split\n" + rows)
    (folder / "scan.dcm").write_bytes(b"x")
    (folder / "cat0.png").write_bytes(b"broken")  # left out, so that the first is another
    code, out, err = cli("prepare", folder, tmp_path / "out")
    assert (code, err) == (0, "")
    assert "test lacks 1 of 3 classes, such as 'cat'" in " ".join(out.split())
    for line in ("image (picture): 8 x 8 PNG", "title (text): dog of 1", "label (class): dog"):
        assert line in out
    pictures(folder, "cat0.png")
    code, out, err = cli("init", "mine.yaml", "--pictures", folder, "--clients", 1)
    assert (code, err) == (0, "")
    assert "label (class): cat" in out
    assert "warning: test lacks 1 of 3 classes, such as 'cat'" in out
    assert "warning: 1 .dcm: not read" in out


SPLIT_CLASSES = [(name, "train") for name in ("cat", "dog", "cow") * 8] + [("dog", "test"), ("cow", "test")] * 4


def test_what_a_view_or_a_network_cannot_read_is_refused_before_anything_is_written(cli: Cli, tmp_path: Path) -> None:
    for k in range(8):
        path = tmp_path / "sounds" / "ab"[k % 2] / f"{k}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile(path)
    pictures(tmp_path / "photos", *(f"{name}/{k}.png" for name in "ab" for k in range(8)))
    for name, file in (("reader", "tokenizer.json"), ("viewer", "preprocessor_config.json")):
        (tmp_path / "weights" / name).mkdir(parents=True)
        for part in ("config.json", file, "model.safetensors"):
            (tmp_path / "weights" / name / part).write_text("{}")
    for given, words in (
        (("--pictures", tmp_path / "sounds"), "column 'audio' holds no pictures"),
        (
            ("--pictures", tmp_path / "photos", "--image-encoder", "reader"),
            "--image-encoder reader: .* reads no images",
        ),
        (("--pictures", tmp_path / "photos", "--text-encoder", "viewer"), "--text-encoder viewer: .* reads no texts"),
    ):
        code, _, err = cli("init", "mine.yaml", *given, "--weights-dir", tmp_path / "weights")
        assert code == 2
        assert re.search(words, " ".join(err.split()))
        assert not Path("mine.yaml").exists()


def soundfile(path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(b"\0\0" * 800)


def test_a_saved_data_set_is_opened_by_init_and_named_by_prepare(cli: Cli, tmp_path: Path) -> None:
    rows = {"text": [f"text {k} of it" for k in range(60)], "label": [("a", "b")[k % 2] for k in range(60)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    code, _, err = cli("prepare", tmp_path / "saved", tmp_path / "out")
    assert code == 2
    assert "was saved by `datasets`, and needs no preparation; the source {name: arrow, path: saved}" in " ".join(
        err.split()
    )
    code, _, err = cli("init", "mine.yaml", "--texts", tmp_path / "saved", "--clients", 2)
    assert (code, err) == (0, "")
    source = Experiment.load("mine.yaml").data.sources["texts"]
    assert source.component_name() == "arrow"
    assert len(source.open("test", name="texts", data_dir=None)) > 5


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("minilm", "Ein Hund läuft", True),
        ("minilm", "a dog of the park", False),
        ("multilingual-e5", "Ein Hund", False),
    ],
)
def test_the_language_of_the_text_network_is_told(name: str, text: str, said: bool) -> None:
    assert bool(StarterEncoders({"text": name}).languages([text] * 5)) == said
