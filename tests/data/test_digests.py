"""The digest of a public set: equal where the same files lie, another one with any content changed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from item_tables import encoded, noise, unread
from polyfed.core.errors import DataError
from polyfed.data.cache import content_digest
from polyfed.data.source import Column
from polyfed.data.sources.scenes import Scenes
from polyfed.data.sources.stored import Parquet
from polyfed.data.view import DataContext


def png(seed: int) -> bytes:
    return encoded(noise(seed, 6, 6))


def column_of(folder: Path, name: str, **changed: Any) -> Column:
    """A column of three rows that are written into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {
        "image": [{"bytes": png(seed), "path": f"{seed}.png"} for seed in range(3)],
        "captions": [["a dog", "an animal"], ["a cat"], ["a bird", "wings"]],
    } | changed
    pq.write_table(pa.table(columns), folder / "train.parquet")
    source = Parquet(path=str(folder), columns={"image": "image", "text": "captions"})
    return source.open("train", name="shared", data_dir=None).read(name)


def digest(column: Column, cache: Path, items: tuple[int, ...] = (0, 1, 2)) -> str:
    return content_digest(column, DataContext(cache), torch.tensor(items))


@pytest.mark.parametrize("name", ["image", "captions"])
def test_copies_elsewhere_have_the_same_digest(tmp_path: Path, name: str) -> None:
    here = digest(column_of(tmp_path / "here", name), tmp_path / "a")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    there = Parquet(path=str(tmp_path / "there"), columns={}).open("train", name="other", data_dir=None).read(name)
    assert digest(there, tmp_path / "b") == here
    assert len(here) == 32


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("image", {"image": [{"bytes": png(seed), "path": f"{seed - 9}.png"} for seed in (9, 10, 11)]}),
        ("captions", {"captions": [["a dog", "an animal"], ["a cat"], ["a bird", "wing"]]}),
        ("captions", {"captions": [["a dog"], ["an animal", "a cat"], ["a bird", "wings"]]}),
        ("captions", {"captions": [["a doga", "n animal"], ["a cat"], ["a bird", "wings"]]}),
    ],
)
def test_changed_content_changes_it(tmp_path: Path, name: str, changed: dict[str, Any]) -> None:
    before = digest(column_of(tmp_path / "a", name), tmp_path / "cache")
    assert digest(column_of(tmp_path / "b", name, **changed), tmp_path / "cache") != before


def test_items_and_their_order_count_and_others_do_not(tmp_path: Path) -> None:
    column = column_of(tmp_path / "a", "captions")
    found = {digest(column, tmp_path / "cache", items) for items in ((0, 1, 2), (0, 2), (2, 0))}
    assert len(found) == 3
    other = column_of(tmp_path / "b", "captions", captions=[["a dog", "an animal"], ["!"], ["a bird", "wings"]])
    assert digest(other, tmp_path / "cache", (0, 2)) == digest(column, tmp_path / "cache", (0, 2))


def test_a_picture_counts_by_its_content_wherever_it_lies(tmp_path: Path) -> None:
    embedded = digest(column_of(tmp_path / "a", "image"), tmp_path / "cache")
    rows = [{"bytes": None, "path": f"files/{seed}.jpg"} for seed in range(3)]
    (tmp_path / "b" / "files").mkdir(parents=True)
    for seed in range(3):
        (tmp_path / "b" / "files" / f"{seed}.jpg").write_bytes(png(seed))
    assert digest(column_of(tmp_path / "b", "image", image=rows), tmp_path / "cache") == embedded
    rows[1]["path"] = "../outside.jpg"
    with pytest.raises(DataError, match="row 1: the path leaves the data set's folder"):
        digest(column_of(tmp_path / "c", "image", image=rows), tmp_path / "cache", (1,))


def test_it_is_computed_once(tmp_path: Path) -> None:
    column = column_of(tmp_path / "a", "image")
    first = digest(column, tmp_path / "cache")

    assert digest(unread(column.fingerprint), tmp_path / "cache") == first


def test_generated_columns_go_by_their_recipe(tmp_path: Path) -> None:
    def generated(**settings: Any) -> Column:
        source = Scenes(train=4, columns={"image": "image"}, **settings)
        return source.open("train", name="any", data_dir=None).modality("image")

    one, same, other = (digest(generated(seed=seed), tmp_path) for seed in (1, 1, 2))
    assert one == same != other
    assert list(tmp_path.iterdir()) == []
