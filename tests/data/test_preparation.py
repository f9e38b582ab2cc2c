"""A folder written as Parquet: what is left out, what is reported, that others can read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from polyfed.core.errors import DataError
from polyfed.data import preparation
from polyfed.data.preparation import REPORT, ColumnRoles, prepare_folder
from polyfed.data.sources.folder import Folder
from polyfed.data.sources.parquet import Parquet

Cli = Callable[..., tuple[int, str, str]]


def picture(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten pictures with captions and splits; one broken, one twice, one without caption, one that no row names."""
    folder = tmp_path / "photos"
    lines = ["file_name,caption,split"]
    for number in range(10):
        picture(folder / f"{number}.png", number)
        split = "test" if number < 2 else "val" if number < 4 else "train"
        lines += [f"{number}.png,{caption},{split}" for caption in (f"thing {number}", f"it is {number}")]
    (folder / "5.png").write_bytes((folder / "5.png").read_bytes()[:60])
    (folder / "6.png").write_bytes((folder / "0.png").read_bytes())
    picture(folder / "loose.png", 99)
    lines = [line for line in lines if not line.startswith("7.png")] + ["7.png,,train"]
    (folder / "captions.csv").write_text("\n".join(lines))
    return folder


def source(folder: Path, **settings: Any) -> Folder:
    return Folder.model_validate({"path": str(folder), "incomplete": "leave_out", **settings})


def test_everything_wrong_is_found_and_what_is_written_reads_back(photos: Path, tmp_path: Path) -> None:
    found = prepare_folder(source(photos), tmp_path / "out")
    assert found.items == {"test": 2, "validation": 2, "train": 5}
    assert list(found.broken) == ["5.png"]
    assert "truncated" in found.broken["5.png"] or "identify" in found.broken["5.png"]
    assert found.in_two_splits == [("test: 0.png", "train: 6.png")]
    assert found.lacking == {"caption": 1}
    assert found.unused == ("loose.png",)
    assert found.roles == ColumnRoles("image", "caption", None)
    stored = json.loads((tmp_path / "out" / REPORT).read_text())
    assert stored["broken"] == found.broken
    written = Parquet(path=str(tmp_path / "out"), id="file_name", columns={"image": "image", "text": "caption"})
    split = written.open("train", name="out", data_dir=None)
    assert split.ids == ("4.png", "6.png", "8.png", "9.png", "7.png")
    assert split.read("caption").values.to_pylist()[0] == ["thing 4", "it is 4"]
    assert split.read("image").values.to_pylist()[0]["bytes"] == (photos / "4.png").read_bytes()


def test_duplicates_are_left_to_the_split_that_judges(photos: Path, tmp_path: Path) -> None:
    assert prepare_folder(source(photos), tmp_path / "out", drop_duplicates=True).items["train"] == 4


def test_datasets_opens_the_pictures(photos: Path, tmp_path: Path) -> None:
    from datasets import Dataset

    prepare_folder(source(photos), tmp_path / "out")
    opened = Dataset.from_parquet(str(tmp_path / "out" / "test-00000-of-00001.parquet"), cache_dir=str(tmp_path / "c"))
    assert opened[0]["image"].size == (8, 8)


def test_large_splits_are_in_several_files(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "BATCH_ITEMS", 2)
    monkeypatch.setattr(preparation, "SHARD_BATCHES", 1)
    prepare_folder(source(photos), tmp_path / "out")
    files = sorted((tmp_path / "out").glob("train-*"))
    assert [file.name for file in files] == [f"train-{number:05d}-of-00003.parquet" for number in range(3)]
    assert sum(pq.read_metadata(file).num_rows for file in files) == 5


def test_texts_are_compared_by_content(tmp_path: Path) -> None:
    folder = tmp_path / "news"
    folder.mkdir()
    (folder / "train.csv").write_text("text,label\na,x\na,x\nb,y\n")
    (folder / "test.csv").write_text("text,label\nb,y\n")
    found = prepare_folder(source(folder), tmp_path / "out")
    assert (found.items, found.repeated, len(found.in_two_splits)) == ({"test": 1, "train": 3}, 1, 1)


def test_nothing_is_left_behind(photos: Path, tmp_path: Path) -> None:
    for number in range(2):
        (photos / f"{number}.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"split 'test': none of 2 items is left; 2 broken, first '0\.png'"):
        prepare_folder(source(photos), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"out' is there already; name a folder that is not"):
        prepare_folder(source(photos), tmp_path / "out")


def test_the_command_says_what_it_found_and_how_to_use_it(
    cli: Cli, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = cli("prepare", "photos", "data/photos", "--drop-duplicates")
    assert (code, err) == (0, "")
    assert "8 items" in out
    assert "5.png: " in out
    assert "test: 0.png = train: 6.png" in out
    line = "photos: {name: parquet, path: photos, id: file_name, columns: {image: image, text: caption}}"
    assert line in out.replace("\n", " ")
    assert "warning: pairs, test: 2 items cannot tell a middling figure from chance, 80 could" in out
    code, _, err = cli("prepare", photos, tmp_path / "more", "--test", "1.5")
    assert code == 2
    assert "fractions.test: " in err
    assert "(got 1.5)" in err


@pytest.mark.parametrize(
    ("columns", "roles"),
    [
        ({"title": ["a b", "c d"], "category": ["x", "y"]}, (None, "title", "category")),
        ({"words": ["one", "two", "three", "four"], "kind": ["x", "x", "y", "y"]}, (None, "words", "kind")),
        ({"label": [1, 2], "note": ["p", "q"]}, (None, "note", "label")),
        ({"file_name": ["a", "b"], "captions": [["x"], ["y"]]}, (None, "captions", None)),
    ],
)
def test_columns_tell_what_they_are_for(columns: dict[str, list[Any]], roles: tuple[str | None, ...]) -> None:
    import pyarrow as pa

    assert ColumnRoles.of(pa.table(columns)) == ColumnRoles(*roles)
