"""Folders as people have them: every layout, how splits come about, what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polyfed.core.errors import ConfigError, DataError
from polyfed.data.preparation import prepare_folder
from polyfed.data.source import Split
from polyfed.data.sources.folder import Folder

CSV = "file_name,caption,price\na.png,a red thing,3\na.png,something red,3\nb.png,a blue thing,4\n"


def picture(path: Path, colour: str = "red") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), colour).save(path)


def files(folder: Path, content: Mapping[str, str]) -> None:
    """Texts as they are, pictures where a name ends so."""
    for name, text in content.items():
        path = folder / name
        if name.endswith((".png", ".jpg")):
            picture(path, text or "red")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


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
    picture(tmp_path / "p" / "a.png")
    findings = prepare_folder(Folder(path=str(tmp_path / "p"), fractions={}), tmp_path / "out")
    assert findings.items == {"train": 1}


def test_rows_of_one_picture_are_one_item_with_lists_of_what_differs(tmp_path: Path) -> None:
    files(tmp_path, {"a.png": "", "b.png": "blue", "captions.csv": CSV})
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
        (
            "captions.jsonl",
            '{"file_name": "a.png", "caption": "red; very, red"}\n{"file_name": "b", "caption": "blue"}\n',
        ),
        (
            "captions.txt",
            "image,caption\na.png,red; very, red\n".replace("red; very, red", '"red; very, red"') + "b.png,blue\n",
        ),
        ("results.csv", "image_name| comment_number| caption\na.png| 0| red; very, red\nb.png| 0| blue\n"),
        ("products.csv", 'Photo;caption\nimages\\a.png;"red; very, red"\nb.png;blue\n'),
    ],
)
def test_tables_of_many_kinds(tmp_path: Path, name: str, text: str) -> None:
    files(tmp_path, {"images/a.png": "", "images/b.png": "", name: text})
    split = opened(tmp_path)
    assert values(split, "caption") == ["red; very, red", "blue"]
    assert paths(split) == ["images/a.png", "images/b.png"]


def test_words_that_others_take_for_missing_are_texts(tmp_path: Path) -> None:
    files(tmp_path, {"a.png": "", "b.png": "", "captions.csv": "file_name,caption\na.png,NA\nb.png,None\n"})
    assert values(opened(tmp_path), "caption") == ["NA", "None"]


def test_an_imagefolder_with_metadata_a_split(tmp_path: Path) -> None:
    files(
        tmp_path,
        {
            "train/a.png": "",
            "train/metadata.csv": "file_name,text\na.png,one\n",
            "test/a.png": "blue",
            "test/metadata.csv": "file_name,text\na.png,two\n",
        },
    )
    assert values(opened(tmp_path, "train"), "text") == ["one"]
    assert (paths(opened(tmp_path, "test")), values(opened(tmp_path, "test"), "text")) == (["test/a.png"], ["two"])


def coco(*names: str) -> str:
    images = [{"id": number, "file_name": name} for number, name in enumerate(names)]
    captions = [{"image_id": number, "caption": f"{name} {k}"} for number, name in enumerate(names) for k in (1, 2)]
    return json.dumps({"images": images, "annotations": captions})


def test_coco_as_it_is_downloaded(tmp_path: Path) -> None:
    files(
        tmp_path,
        {
            "train2017/1.jpg": "",
            "val2017/2.jpg": "",
            "annotations/captions_train2017.json": coco("1.jpg"),
            "annotations/captions_val2017.json": coco("2.jpg"),
            "annotations/instances_val2017.json": "{}",
        },
    )
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


def test_flickr8k_with_its_lists(tmp_path: Path) -> None:
    lines = "".join(f"{k}.jpg#{n}\tcaption {n} of {k}\n" for k in "123" for n in (0, 1))
    files(
        tmp_path,
        {f"Flicker8k_Dataset/{k}.jpg": "" for k in "123"}
        | {"Flickr8k.token.txt": lines}
        | {f"Flickr_8k.{split}Images.txt": f"{k}.jpg\n" for split, k in (("train", 1), ("dev", 2), ("test", 3))},
    )
    for split, k in (("train", 1), ("validation", 2), ("test", 3)):
        assert values(opened(tmp_path, split), "captions") == [[f"caption 0 of {k}", f"caption 1 of {k}"]]


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


def test_splits_that_nothing_tells_are_drawn(tmp_path: Path) -> None:
    files(tmp_path, {f"{kind}/{k}.png": "" for kind in ("cat", "dog") for k in range(10)})
    fractions = {"validation": 0.1, "test": 0.25}
    parts = {split: opened(tmp_path, split, fractions=fractions).ids for split in ("train", "validation", "test")}
    assert {split: len(ids) for split, ids in parts.items()} == {"train": 13, "validation": 2, "test": 5}
    assert len(set().union(*parts.values())) == 20
    again = Folder(path=str(tmp_path), fractions=fractions).open("test", name="other", data_dir=None)
    assert tuple(again.ids) == tuple(parts["test"])


def test_equal_texts_are_drawn_into_one_split(tmp_path: Path) -> None:
    files(tmp_path, {"news.txt": "\n".join(f"text {k % 10}" for k in range(100))})
    fractions = {"validation": 0.2, "test": 0.3}
    parts = [
        set(values(opened(tmp_path, split, fractions=fractions), "text")) for split in ("train", "validation", "test")
    ]
    assert [len(part) for part in parts] == [5, 2, 3]


def test_a_column_of_splits_of_ones_own(tmp_path: Path) -> None:
    rows = "image,caption,fold\na.png,x,A\nb.png,y,B\n"
    files(tmp_path, {"a.png": "", "b.png": "", "captions.csv": rows})
    settings = {"split_column": "fold", "splits": {"train": ["A"], "test": ["B"]}}
    assert values(opened(tmp_path, "test", **settings), "caption") == ["y"]


def test_a_changed_file_is_seen_and_read_again(tmp_path: Path) -> None:
    files(tmp_path, {"a.png": "", "b.png": "", "captions.csv": CSV})
    before = opened(tmp_path).read("caption")
    (tmp_path / "captions.csv").write_text(CSV + "b.png,another,4\n")
    after = opened(tmp_path).read("caption")
    assert after.values.to_pylist()[1] == ["a blue thing", "another"]
    assert before.fingerprint != after.fingerprint


def test_rows_of_pictures_that_are_not_there_are_left_out_if_asked(tmp_path: Path) -> None:
    files(tmp_path, {"a.png": "", "captions.csv": CSV})
    with pytest.raises(DataError, match=r"names 1 pictures that are not in .*, first 'b.png'; add them, or"):
        opened(tmp_path)
    assert opened(tmp_path, incomplete="leave_out").ids == ("a.png",)


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ({"x.md": "hello"}, {}, "there is nothing to read in"),
        ({"a.png": ""}, {}, "has pictures alone, such as 'a.png'; add a captions.csv"),
        (
            {"a.png": "", "captions.csv": "name,caption\na.png,x\n"},
            {},
            "has no column of file names.*: name, caption",
        ),
        (
            {"a.png": "", "captions.csv": "name,caption\na.png,x\n"},
            {"file_column": "nam"},
            r"no column 'nam' \(file_column, --file-column\); did you mean 'name'",
        ),
        ({"a.png": "", "captions.csv": "file_name,caption\nz.png,x\n"}, {}, "no picture called 'z.png', nor any other"),
        ({"a.png": "", "captions.csv": "file_name,caption\n"}, {}, "has no rows"),
        ({"a.png": "", "captions.jsonl": "{nonsense"}, {}, "cannot be read as JSON objects, one a line"),
        ({"a.png": "", "one.csv": CSV, "two.csv": CSV}, {}, "which of one.csv, two.csv says what belongs"),
        ({"a.png": "", "captions.csv": CSV}, {"annotations": "caption.csv"}, "no file 'caption.csv' .* 'captions.csv'"),
        ({"p/a.png": "", "q/a.png": "", "captions.csv": CSV}, {}, "'a.png' may be 'p/a.png' or 'q/a.png'"),
        ({"a.png": "", "b.png": "", "captions.csv": CSV}, {"split_column": "fold"}, "no column 'fold' .split_column"),
        (
            {"a.png": "", "captions.csv": "file_name,caption,split\na.png,x,extra\n"},
            {},
            "column 'split': 'extra' is none of the splits",
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


def test_a_split_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    files(tmp_path, {"a.png": "", "b.png": "", "captions.csv": CSV})
    with pytest.raises(DataError, match="no split 'validation'; valid: train; or give it a share"):
        opened(tmp_path, "validation")


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ({"tset": 0.1}, "'tset' is no split to be drawn"),
        ({"validation": 0.5, "test": 0.5}, "leave something for train"),
    ],
)
def test_fractions_leave_something_to_train_on(fractions: Mapping[str, float], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        Folder.model_validate({"path": "x", "fractions": fractions})
