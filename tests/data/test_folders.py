"""Folders as people have them: every layout, how splits come about, what is refused, and folders written as Parquet."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polyfed.core.errors import ConfigError, DataError
from polyfed.data import preparation
from polyfed.data.preparation import REPORT, ColumnRoles, prepare_folder
from polyfed.data.source import Split
from polyfed.data.sources.folder import Folder
from polyfed.data.sources.stored import Parquet
from polyfed.runs.experiment import Experiment
from polyfed.runs.starter import StarterEncoders
from zoo import image, pictures, sounds

CSV = "file_name,caption,price\na.png,a red thing,3\na.png,something red,3\nb.png,a blue thing,4\n"


def files(folder: Path, content: Mapping[str, str]) -> None:
    """Texts as they are, images where a name ends so."""
    pictures(folder, *(name for name in content if name.endswith((".png", ".jpg"))))
    for name, text in content.items():
        if not name.endswith((".png", ".jpg")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def opened(folder: Path, split: str = "train", **settings: Any) -> Split:
    columns = settings.pop("columns", {})
    source = Folder.model_validate({"path": str(folder), "fractions": {}, "columns": columns} | settings)
    return source.open(split, name="mine", data_dir=None)


def values(split: Split, column: str) -> list[Any]:
    return split.read(column).values.to_pylist()


def paths(split: Split) -> list[str]:
    return [image["path"] for image in values(split, "image")]


def test_a_column_called_audio_makes_no_recordings(tmp_path: Path) -> None:
    files(tmp_path, {"texts.csv": "audio,label\nloud,a\nsoft,b\n", "p/metadata.csv": "file_name,audio\na.png,loud\n"})
    assert values(opened(tmp_path / "texts.csv"), "audio") == ["loud", "soft"]
    pictures(tmp_path / "p", "a.png")
    assert prepare_folder(Folder(path=str(tmp_path / "p"), fractions={}), tmp_path / "out").items == {"train": 1}


def test_rows_of_one_image_are_one_item_with_lists_of_what_differs(tmp_path: Path) -> None:
    files(tmp_path, {"a.png": "", "b.png": "", "captions.csv": CSV})
    split = opened(tmp_path, columns={"image": "image", "text": "caption"})
    assert split.ids == ("a.png", "b.png")
    assert values(split, "caption") == [["a red thing", "something red"], ["a blue thing"]]
    assert values(split, "price") == [3, 4]
    assert paths(split) == ["a.png", "b.png"]
    assert split.modality("text").nested


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("captions.tsv", "image\tcaption\na.png\tred; very, red\nb.png\tblue\n"),
        ("captions.jsonl", '{"image": "a.png", "caption": "red; very, red"}\n{"image": "b", "caption": "blue"}\n'),
        ("captions.txt", 'image,caption\na.png,"red; very, red"\nb.png,blue\n'),
        ("results.csv", "image_name| comment_number| caption\na.png| 0| red; very, red\nb.png| 0| blue\n"),
        ("products.csv", 'Photo;caption\nimages\\a.png;"red; very, red"\nb.png;blue\n'),
    ],
)
def test_tables_of_many_kinds(tmp_path: Path, name: str, text: str) -> None:
    files(tmp_path, {"images/a.png": "", "images/b.png": "", name: text})
    split = opened(tmp_path)
    assert values(split, "caption") == ["red; very, red", "blue"]
    assert paths(split) == ["images/a.png", "images/b.png"]


def test_an_imagefolder_with_metadata_a_split(tmp_path: Path) -> None:
    files(tmp_path, {"train/a.png": "", "train/metadata.csv": "file_name,text\na.png,one\n"})
    files(tmp_path, {"test/a.png": "", "test/metadata.csv": "file_name,text\na.png,two\n"})
    assert values(opened(tmp_path, "train"), "text") == ["one"]
    assert (paths(opened(tmp_path, "test")), values(opened(tmp_path, "test"), "text")) == (["test/a.png"], ["two"])


def coco(*names: str) -> str:
    images = [{"id": number, "file_name": name} for number, name in enumerate(names)]
    captions = [{"image_id": number, "caption": f"{name} {k}"} for number, name in enumerate(names) for k in (1, 2)]
    return json.dumps({"images": images, "annotations": captions})


def test_coco_as_it_is_downloaded(tmp_path: Path) -> None:
    files(tmp_path, {"train2017/1.jpg": "", "annotations/captions_train2017.json": coco("1.jpg")})
    files(tmp_path, {"val2017/2.jpg": "", "annotations/captions_val2017.json": coco("2.jpg")})
    files(tmp_path, {"annotations/instances_val2017.json": "{}"})
    assert values(opened(tmp_path, "train"), "captions") == [["1.jpg 1", "1.jpg 2"]]
    split = opened(tmp_path, "validation")
    assert (paths(split), values(split, "captions")) == (["val2017/2.jpg"], [["2.jpg 1", "2.jpg 2"]])


def test_karpathys_splits(tmp_path: Path) -> None:
    images = [
        {"filename": f"{name}.jpg", "filepath": "val2014", "split": split, "sentences": [{"raw": f"{name} {split}"}]}
        for name, split in (("1", "train"), ("2", "restval"), ("3", "val"), ("4", "test"))
    ]
    files(tmp_path, {f"val2014/{k}.jpg": "" for k in "1234"} | {"dataset_coco.json": json.dumps({"images": images})})
    assert values(opened(tmp_path, "train"), "captions") == [["1 train"], ["2 restval"]]
    assert values(opened(tmp_path, "validation"), "captions") == [["3 val"]]
    only = opened(tmp_path, "train", splits={"train": ["restval"], "test": ["train", "val", "test"]})
    assert values(only, "captions") == [["2 restval"]]


def test_class_folders_with_and_without_splits(tmp_path: Path) -> None:
    files(tmp_path / "flat", {"cat/1.png": "", "dog/1.png": "", "dog/2.png": ""})
    split = opened(tmp_path / "flat", targets={"label": "label"})
    assert split.classes == {"label": ("cat", "dog")}
    assert values(split, "label") == [0, 1, 1]
    files(tmp_path / "deep", {"train/cat/1.png": "", "train/dog/1.png": "", "val/dog/2.png": ""})
    split = opened(tmp_path / "deep", "validation", targets={"label": "label"})
    assert (values(split, "label"), split.classes["label"]) == ([1], ("cat", "dog"))


def test_texts_alone(tmp_path: Path) -> None:
    files(tmp_path / "two", {"train.csv": "text,topic\none,a\ntwo,b\n", "test.csv": "text,topic\nthree,b\n"})
    split = opened(tmp_path / "two", "test", targets={"topic": "topic"})
    assert (values(split, "text"), values(split, "topic")) == (["three"], [1])
    files(tmp_path / "lines", {"news.txt": "one\n\ntwo\n"})
    assert values(opened(tmp_path / "lines"), "text") == ["one", "two"]
    assert values(opened(tmp_path / "two" / "train.csv"), "text") == ["one", "two"]


def test_undefined_splits_are_drawn(tmp_path: Path) -> None:
    files(tmp_path, {f"{form}/{k}.png": "" for form in ("cat", "dog") for k in range(10)})
    fractions = {"validation": 0.1, "test": 0.25}
    parts = {split: opened(tmp_path, split, fractions=fractions).ids for split in ("train", "validation", "test")}
    assert {split: len(ids) for split, ids in parts.items()} == {"train": 13, "validation": 2, "test": 5}
    assert len(set().union(*parts.values())) == 20
    again = Folder(path=str(tmp_path), fractions=fractions).open("test", name="other", data_dir=None)
    assert tuple(again.ids) == tuple(parts["test"])


def test_a_column_of_splits_of_ones_own(tmp_path: Path) -> None:
    files(tmp_path, {"a.png": "", "b.png": "", "captions.csv": "image,caption,fold\na.png,x,A\nb.png,y,B\n"})
    settings = {"split_column": "fold", "splits": {"train": ["A"], "test": ["B"]}}
    assert values(opened(tmp_path, "test", **settings), "caption") == ["y"]


def test_a_changed_file_is_seen_and_read_again(tmp_path: Path) -> None:
    files(tmp_path, {"a.png": "", "b.png": "", "captions.csv": CSV})
    before = opened(tmp_path).read("caption")
    (tmp_path / "captions.csv").write_text(CSV + "b.png,another,4\n")
    after = opened(tmp_path).read("caption")
    assert after.values.to_pylist()[1] == ["a blue thing", "another"]
    assert before.fingerprint != after.fingerprint


def test_rows_of_images_that_are_not_there_are_left_out_if_asked(tmp_path: Path) -> None:
    files(tmp_path, {"a.png": "", "captions.csv": CSV})
    with pytest.raises(DataError, match=r"names 1 images that are not in .*, first 'b.png'; add them, or"):
        opened(tmp_path)
    assert opened(tmp_path, incomplete="leave_out").ids == ("a.png",)


A = {"a.png": ""}
NO_NAM = r"no column 'nam' \(file_column, --file-column\); did you mean 'name'"


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ({"x.md": "hello"}, {}, "no readable data in"),
        ({"a.png": ""}, {}, "has images alone, such as 'a.png'; add a captions.csv"),
        ({"a.png": "", "captions.csv": "name,caption\nz.png,x\n"}, {}, "has no column of file names.*: name, caption"),
        (A | {"captions.csv": "name,caption\na.png,x\n"}, {"file_column": "nam"}, NO_NAM),
        (A | {"captions.csv": "file_name,caption\nz.png,x\n"}, {}, "neither 'z.png' nor any other image of its rows"),
        ({"a.png": "", "captions.csv": "file_name,caption\n"}, {}, "has no rows"),
        ({"a.png": "", "captions.jsonl": "{nonsense"}, {}, "cannot be read as JSON objects, one a line"),
        ({"a.png": "", "one.csv": CSV, "two.csv": CSV}, {}, "any of one.csv, two.csv may belong to the images"),
        ({"a.png": "", "captions.csv": CSV}, {"annotations": "caption.csv"}, "no file 'caption.csv' .* 'captions.csv'"),
        ({"p/a.png": "", "q/a.png": "", "captions.csv": CSV}, {}, "'a.png' may be 'p/a.png' or 'q/a.png'"),
        ({"a.png": "", "b.png": "", "captions.csv": CSV}, {"split_column": "fold"}, "no column 'fold' .split_column"),
        (
            A | {"captions.csv": "file_name,caption,split\na.png,x,extra\n"},
            {},
            "column 'split': 'extra' is not one of the splits",
        ),
        ({"a.jpg": "", "captions_val2017.json": '{"images": [], "annotations": []}'}, {}, "has no captions"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, content: Mapping[str, str], settings: Mapping[str, Any], message: str
) -> None:
    files(tmp_path, content)
    with pytest.raises(DataError, match=message):
        opened(tmp_path, **settings)


@pytest.mark.parametrize(
    ("fractions", "message"),
    [({"tset": 0.1}, "'tset' cannot be drawn"), ({"validation": 0.5, "test": 0.5}, "leave something for train")],
)
def test_fractions_leave_something_to_train_on(fractions: Mapping[str, float], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        Folder.model_validate({"path": "x", "fractions": fractions})


Cli = Callable[..., tuple[int, str, str]]


def done(cli: Cli, *arguments: object) -> str:
    """Output of a command that has nothing to complain about."""
    code, out, err = cli(*arguments)
    assert (code, err) == (0, "")
    return out


def labels(folder: Path) -> dict[str, Any]:
    table = Folder(path=str(folder)).content()
    rows = table.rows.to_pydict()
    return dict(zip(rows["file_name"], zip(table.splits, rows["label"], strict=True), strict=True))


@pytest.mark.parametrize(
    ("paths", "result"),
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
def test_the_split_is_the_outermost_folder_and_the_label_the_innermost(tmp_path: Path, paths: str, result: str) -> None:
    lines = labels(pictures(tmp_path / "data", *paths.split()))
    assert " ".join(f"{split}:{label}" for split, label in (lines[path] for path in paths.split())) == result


def test_folders_of_splits_without_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\('test_images' is taken for a split\); .* folders of their classes"):
        labels(pictures(tmp_path / "data", "train_images/1.png", "test_images/1.png"))


def test_files_that_are_not_read_are_listed_and_what_pillow_reads_is_read(cli: Cli, tmp_path: Path) -> None:
    folder = pictures(tmp_path / "data", *(f"{name}/{k}.png" for name in "ab" for k in range(10)))
    pictures(folder, "a/x.jfif", "b/x.jp2")
    for name in ("a/1.dcm", "a/2.DCM", "b/scan", "notes.txt"):
        (folder / name).write_bytes(b"x")
    table = Folder(path=str(folder)).content()
    assert {path for path in table.rows["file_name"].to_pylist() if "x" in path} == {"a/x.jfif", "b/x.jp2"}
    assert table.unread == {".dcm": 2, "without ending": 1, ".txt": 1}
    out = done(cli, "prepare", folder, tmp_path / "out")
    assert "files that are not read, by ending" in out
    assert ".dcm: 2" in out


def test_an_unread_file_differs_from_a_missing_one(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "data", "a.png")
    (folder / "b.dcm").write_bytes(b"x")
    (folder / "captions.csv").write_text("file_name,caption\na.png,x\nb.dcm,y\n")
    with pytest.raises(DataError, match=r"'b.dcm' \(there, but .dcm is not read: `dcmj2pnm"):
        Folder(path=str(folder)).content()
    assert Folder(path=str(folder), incomplete="leave_out").content().without_image == (
        "b.dcm (there, but .dcm is not read: `dcmj2pnm --write-png --min-max-window 1.dcm 1.png` (DCMTK))",
    )


# ---- masks


@pytest.mark.parametrize(
    ("images", "masks"),
    [("images/{}.jpg", "masks/{}.png"), ("train/img/{}.jpg", "train/gt/{}_gt.png"), ("images/a/{}.jpg", "gt/a/{}.png")],
)
def test_folders_of_masks_are_not_classes(tmp_path: Path, cli: Cli, images: str, masks: str) -> None:
    folder = pictures(tmp_path / "data", *(form.format(k) for k in range(9) for form in (images, masks)))
    content = Folder(path=str(folder)).content()
    assert (content.rows.column_names, content.unused) == (["file_name", "image", "mask"], ())
    pairs = [(row["image"]["path"], row["mask"]["path"]) for row in content.rows.to_pylist()]
    assert pairs == [(images.format(k), masks.format(k)) for k in range(9)]
    assert "mask (mask): 8 x 8 PNG, values " in done(cli, "prepare", folder, tmp_path / "out")
    train = Parquet(path=str(tmp_path / "out")).table("train", name="mine", data_dir=None)
    assert train.read("mask")[0]["bytes"].as_py()[1:4] == b"PNG"
    code, _, err = cli("init", "mine.yaml", "--pictures", folder)
    assert (code, Path("mine.yaml").exists()) == (2, False)
    assert f"these are masks: give --masks {folder}" in " ".join(err.split())


@pytest.mark.parametrize("odd", ["images/9.png", "masks/9.png", "hats/0.png"])
def test_an_image_without_a_mask_or_a_class_next_to_masks_is_refused(tmp_path: Path, odd: str) -> None:
    folder = pictures(tmp_path / "data", odd, *(f"{name}/{k}.png" for k in range(4) for name in ("images", "masks")))
    with pytest.raises(DataError, match=r"masks have names of images, such as 'masks/0.png', but not"):
        Folder(path=str(folder)).content()


def test_images_may_have_masks_and_files_of_captions(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "data", *(f"{name}/{k}.png" for k in range(4) for name in ("images", "masks")))
    files(folder, {f"images/{k}.txt": f"one of {k}\nanother\n" for k in range(4)})
    rows = Folder(path=str(folder)).content().rows
    assert ColumnRoles.of(rows) == ColumnRoles("image", "captions", None, mask="mask")
    assert rows["mask"][3]["path"].as_py() == "masks/3.png"


def test_a_class_that_is_called_as_masks_are_stays_a_class(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "data", *(f"{name}/{name}{k}.png" for k in range(4) for name in ("hats", "masks")))
    assert set(Folder(path=str(folder)).content().rows["label"].to_pylist()) == {"hats", "masks"}


def test_a_column_of_paths_of_images_opens_as_images(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "data", "p/1.png", "p/2.png", "m/1.png")
    (folder / "metadata.csv").write_text("file_name,mask,text\np/1.png,m/1.png,see a.png\np/2.png,,p/2\n")
    rows = Folder(path=str(folder)).content().rows
    assert rows["mask"].to_pylist() == [{"bytes": None, "path": "m/1.png"}, None]
    assert ColumnRoles.of(rows) == ColumnRoles("image", "text", None, mask="mask")
    for row in ("m/7.png", "7.png"):
        (folder / "metadata.csv").write_text(f"file_name,mask\np/1.png,{'m/1.png' * ('/' in row)}\np/2.png,{row}\n")
        with pytest.raises(DataError, match=rf"column 'mask': no image '{row}'; write paths from"):
            Folder(path=str(folder)).content()


# ---- roles and labels


@pytest.mark.parametrize("name", ["caption", "Captions", "text", "report", "findings", "impression", "sentence"])
def test_repeated_texts_are_not_labels(name: str) -> None:
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
    columns = {"text": texts.cast(pa.string_view()), "label": texts.dictionary_encode()}
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
    opened = (source.open(split, name="mine", data_dir=None) for split in ("train", "validation", "test"))
    parts = [split.modality("text").texts() for split in opened]
    assert [len(part) for part in parts] == [39, 6, 15]
    assert len(set.union(*map(set, parts))) == sum(len(set(part)) for part in parts) == 20
    pq.write_table(pa.table({"text": ["a test"]}), tmp_path / "test.parquet")
    assert len(source.open("test", name="mine", data_dir=None)) == 1


# ---- output of prepare and init before anything is written


def test_a_sample_and_classes_that_a_split_lacks_are_shown(cli: Cli, tmp_path: Path) -> None:
    rows = "".join(f"{name}{k}.png,{name} of {k},{name},{split}\n" for k, (name, split) in enumerate(SPLIT_CLASSES))
    folder = pictures(tmp_path / "data", *(f"{name}{k}.png" for k, (name, _) in enumerate(SPLIT_CLASSES)))
    (folder / "labels.csv").write_text("file_name,title,label,split\n" + rows)
    (folder / "scan.dcm").write_bytes(b"x")
    (folder / "cat0.png").write_bytes(b"broken")  # left out, so that the first is another
    out = done(cli, "prepare", folder, tmp_path / "out")
    assert "test lacks 1 of 3 classes, such as 'cat'" in " ".join(out.split())
    for line in ("image (image): 8 x 8 PNG", "title (text): dog of 1", "label (class): dog"):
        assert line in out
    pictures(folder, "cat0.png")
    out = done(cli, "init", "mine.yaml", "--pictures", folder, "--clients", 1)
    assert "label (class): cat" in out
    assert "warning: test lacks 1 of 3 classes, such as 'cat'" in out
    assert "left out: 1 .dcm files, which are not read" in out


SPLIT_CLASSES = [(name, "train") for name in ("cat", "dog", "cow") * 8] + [("dog", "test"), ("cow", "test")] * 4


def test_what_a_view_or_a_network_cannot_read_is_refused_before_anything_is_written(cli: Cli, tmp_path: Path) -> None:
    sounds(tmp_path / "sounds")
    pictures(tmp_path / "photos", *(f"{name}/{k}.png" for name in "ab" for k in range(8)))
    for name, file in (("reader", "tokenizer.json"), ("viewer", "preprocessor_config.json")):
        files(tmp_path / "weights" / name, dict.fromkeys(("config.json", file, "model.safetensors"), "{}"))
    listener = dict.fromkeys(("config.json", "preprocessor_config.json"), '{"num_mel_bins": 128}')
    files(tmp_path / "weights" / "listener", listener)
    for given, words in (
        (("--pictures", tmp_path / "sounds"), "no column with pictures, only .*; these are sounds: give --sounds "),
        (("--pictures", tmp_path / "photos", "--image-encoder", "listener"), "listener: this network reads no images"),
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


def test_a_saved_data_set_is_opened_by_init_and_named_by_prepare(cli: Cli, tmp_path: Path) -> None:
    rows = {"text": [f"text {k} of it" for k in range(60)], "label": [("a", "b")[k % 2] for k in range(60)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    code, _, err = cli("prepare", tmp_path / "saved", tmp_path / "out")
    assert code == 2
    reason = "was saved by `datasets`, and needs no preparation; the source {name: arrow, path: saved}"
    assert reason in " ".join(err.split())
    done(cli, "init", "mine.yaml", "--texts", tmp_path / "saved", "--clients", 2)
    source = Experiment.load("mine.yaml").data.sources["texts"]
    assert source.component_name() == "arrow"
    assert len(source.open("test", name="texts", data_dir=None)) > 5


@pytest.mark.parametrize(
    ("name", "text", "note"),
    [
        ("minilm", "Ein Hund läuft auf der Wiese", "be German, and minilm covers English alone"),
        ("minilm", "un chien dans les feuilles et la neige", "be French"),
        ("minilm", "собака бежит по снегу", "be of Cyrillic letters"),
        ("minilm", "犬が走っている", "be of Hiragana letters"),
        ("minilm", "Sněží a běží žlutý pes", "be of letters that English lacks"),
        ("minilm", "a dog runs after the ball of a boy at the café", ""),
        ("minilm", "red cotton shirt", ""),
        ("multilingual-e5", "Ein Hund und eine Katze", "which multilingual-e5 should cover"),
        (None, "Ein Hund und eine Katze", "tokens are made from scratch, which goes for any language"),
    ],
)
def test_the_language_of_texts_and_what_their_network_covers_are_noted(name: str | None, text: str, note: str) -> None:
    lines = StarterEncoders({"text": name} if name else {}).languages([text] * 5)
    assert ([note in line for line in lines] == [True]) if note else lines == []
    if "covers English alone" in note:
        assert "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2 is multilingual" in lines[0]


def test_captions_may_be_in_text_files_next_to_images(cli: Cli, tmp_path: Path) -> None:
    shop = pictures(tmp_path / "shop", *(f"{'ab'[number % 2]}/{number}.jpg" for number in range(40)))
    files(shop, {f"{'ab'[number % 2]}/{number}.txt": f"thing {number}\n\nit is {number}\n" for number in range(40)})
    files(shop, {"a/10.txt": "\n", "note.txt": "of whom these are"})
    content = Folder(path=str(shop)).content()
    row = content.rows.slice(0, 1).to_pylist()[0]
    assert (row["file_name"], row["captions"], row["label"]) == ("a/0.jpg", ["thing 0", "it is 0"], "a")
    assert (content.unused, content.without_image, content.unread) == (("a/10.jpg",), ("note.txt",), {})
    assert (len(content.rows), len(prepare_folder(lenient(shop), tmp_path / "out").broken)) == (39, 0)
    out = done(cli, "init", tmp_path / "mine.yaml", "--pairs", shop, "--clients", 1)
    assert "left out: 1 caption files without an image, such as 'note.txt'" in out
    for file in shop.rglob("*.txt"):
        file.write_text("0 0.5 0.5 0.1 2e-1\n")  # a box and its class
    assert Folder(path=str(shop)).content().rows.column_names == ["file_name", "label", "image"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten images with captions and splits; one broken, one twice, one without caption, one that no row names."""
    folder = pictures(tmp_path / "photos", *(f"{number}.png" for number in range(10)))
    lines = ["file_name,caption,split"]
    for number in range(10):
        split = "test" if number < 2 else "val" if number < 4 else "train"
        lines += [f"{number}.png,{caption},{split}" for caption in (f"thing {number}", f"it is {number}")]
    (folder / "5.png").write_bytes((folder / "5.png").read_bytes()[:60])
    (folder / "6.png").write_bytes((folder / "0.png").read_bytes())
    image(folder / "loose.png", 99)
    lines = [line for line in lines if not line.startswith("7.png")] + ["7.png,,train"]
    (folder / "captions.csv").write_text("\n".join(lines))
    return folder


def lenient(folder: Path, **settings: Any) -> Folder:
    return Folder.model_validate({"path": str(folder), "incomplete": "leave_out", **settings})


def test_everything_wrong_is_found_and_what_is_written_reads_back(photos: Path, tmp_path: Path) -> None:
    result = prepare_folder(lenient(photos), tmp_path / "out")
    assert result.items == {"test": 2, "validation": 2, "train": 5}
    assert list(result.broken) == ["5.png"]
    assert "truncated" in result.broken["5.png"] or "identify" in result.broken["5.png"]
    assert result.in_two_splits == [("test: 0.png", "train: 6.png")]
    assert result.lacking == {"caption": 1}
    assert result.unused == ("loose.png",)
    assert result.roles == ColumnRoles("image", "caption", None)
    assert json.loads((tmp_path / "out" / REPORT).read_text())["broken"] == result.broken
    written = Parquet(path=str(tmp_path / "out"), id="file_name", columns={"image": "image", "text": "caption"})
    split = written.open("train", name="out", data_dir=None)
    assert split.ids == ("4.png", "6.png", "8.png", "9.png", "7.png")
    assert split.read("caption").values.to_pylist()[0] == ["thing 4", "it is 4"]
    assert split.read("image").values.to_pylist()[0]["bytes"] == (photos / "4.png").read_bytes()


def test_duplicates_are_left_to_the_split_that_judges(photos: Path, tmp_path: Path) -> None:
    assert prepare_folder(lenient(photos), tmp_path / "out", drop_duplicates=True).items["train"] == 4


def test_datasets_opens_the_images(photos: Path, tmp_path: Path) -> None:
    from datasets import Dataset

    prepare_folder(lenient(photos), tmp_path / "out")
    opened = Dataset.from_parquet(str(tmp_path / "out" / "test-00000-of-00001.parquet"), cache_dir=str(tmp_path / "c"))
    assert opened[0]["image"].size == (8, 8)


def test_large_splits_are_in_several_files(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "BATCH_ITEMS", 2)
    monkeypatch.setattr(preparation, "SHARD_BATCHES", 1)
    prepare_folder(lenient(photos), tmp_path / "out")
    files = sorted((tmp_path / "out").glob("train-*"))
    assert [file.name for file in files] == [f"train-{number:05d}-of-00003.parquet" for number in range(3)]
    assert sum(pq.read_metadata(file).num_rows for file in files) == 5


def test_texts_are_compared_by_content(tmp_path: Path) -> None:
    files(tmp_path / "news", {"train.csv": "text,label\na,x\na,x\nb,y\n", "test.csv": "text,label\nb,y\n"})
    result = prepare_folder(lenient(tmp_path / "news"), tmp_path / "out")
    assert (result.items, result.repeated, len(result.in_two_splits)) == ({"test": 1, "train": 3}, 1, 1)


def test_nothing_is_left_behind(photos: Path, tmp_path: Path) -> None:
    for number in range(2):
        (photos / f"{number}.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"split 'test': none of 2 items is left; 2 broken, first '0\.png'"):
        prepare_folder(lenient(photos), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"out' exists; name a new folder"):
        prepare_folder(lenient(photos), tmp_path / "out")


def test_the_command_shows_its_findings_and_their_use(
    cli: Cli, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = done(cli, "prepare", "photos", "data/photos", "--drop-duplicates")
    few = "warning: pairs, test: 2 items cannot separate a middling figure from chance, 80 could"
    assert all(line in out for line in ("8 items", "5.png: ", "test: 0.png = train: 6.png", few)), out
    line = "photos: {name: parquet, path: photos, id: file_name, columns: {image: image, text: caption}}"
    assert line in out.replace("\n", " ")
    code, _, err = cli("prepare", photos, tmp_path / "more", "--test", "1.5")
    assert code == 2
    assert "fractions.test: " in err
    assert "1.5 is not a share of 0 to less than 1" in err


@pytest.mark.parametrize(
    ("columns", "roles"),
    [
        ({"title": ["a b", "c d"], "category": ["x", "y"]}, (None, "title", "category")),
        ({"words": ["one", "two", "three", "four"], "kind": ["x", "x", "y", "y"]}, (None, "words", "kind")),
        ({"label": [1, 2], "note": ["p", "q"]}, (None, "note", "label")),
        ({"file_name": ["a", "b"], "captions": [["x"], ["y"]]}, (None, "captions", None)),
    ],
)
def test_roles_of_columns_are_detected(columns: dict[str, list[Any]], roles: tuple[str | None, ...]) -> None:
    assert ColumnRoles.of(pa.table(columns)) == ColumnRoles(*roles)
