"""Rows of a data set that somebody else wrote: the files that they may name, and the size of their pictures."""

from __future__ import annotations

import os
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from item_tables import column_of, encoded
from polyfed.core.errors import DataError
from polyfed.data.cache import decoded
from polyfed.data.images import opened_picture, picture_bytes
from polyfed.data.sources.parquet import Parquet


def png(size: tuple[int, int] = (4, 4)) -> bytes:
    return encoded(Image.new("L", size, 7))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header says that it is large."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")
    )


def named(path: object) -> dict[str, Any]:
    return {"bytes": None, "path": str(path)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set's folder with a picture in it, and one beside it."""
    made = tmp_path / "set"
    (made / "deep").mkdir(parents=True)
    (made / "deep" / "a.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png())
    return made


def test_a_path_is_one_of_the_data_sets_own_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for path in ("deep/a.png", "./deep/../deep/a.png", folder / "deep" / "a.png"):
        assert picture_bytes(named(path), folder) == png()
    assert picture_bytes(named("deep/a.png"), Path("set")) == png()


@pytest.mark.parametrize(
    "path", ["../secret.png", "deep/../../secret.png", "/etc/hostname", "/dev/zero", "link.png", "far/secret.png"]
)
def test_a_path_that_leaves_the_folder_is_refused(folder: Path, path: str) -> None:
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "far").symlink_to(folder.parent)
    with pytest.raises(ValueError, match="the path leaves the data set's folder"):
        picture_bytes(named(path), folder)


def test_what_is_no_regular_file_is_refused_at_once(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")  # reading it would wait for a writer
    with pytest.raises(ValueError, match="not that of a regular file"):
        picture_bytes(named("pipe.png"), folder)
    with pytest.raises((ValueError, OSError)):
        picture_bytes(named("deep"), folder)
    with pytest.raises(ValueError, match="no folder of files"):
        picture_bytes(named(folder / "deep" / "a.png"), None)
    with pytest.raises(ValueError, match="neither bytes nor a path but str"):
        picture_bytes("a.png", folder)


def test_a_large_file_is_not_read(folder: Path) -> None:
    with (folder / "sparse.png").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"1,099,511,627,776 bytes, the limit is .*\(data\.max_pixels\)"):
        picture_bytes(named("sparse.png"), folder)


def test_the_rows_of_a_parquet_folder_name_files_below_it(folder: Path, tmp_path: Path) -> None:
    rows = [named("deep/a.png"), named("../secret.png")]
    pq.write_table(pa.table({"image": rows[:1]}), folder / "train.parquet")
    pq.write_table(pa.table({"image": rows}), folder / "test.parquet")
    source = Parquet(path="set", columns={"image": "image"})

    def pictures(split: str) -> np.ndarray[Any, Any]:
        column = source.open(split, name="pets", data_dir=tmp_path).modality("image")
        return decoded(column, 8, tmp_path / "cache")

    assert pictures("train").shape == (1, 3, 8, 8)
    with pytest.raises(
        DataError, match=r"set/test, column 'image', row 1 \(path '\.\./secret\.png'\).*leaves the data"
    ):
        pictures("test")
    assert [path for path in (tmp_path / "cache").iterdir() if ".tmp" in path.name] == []


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pixels_are_counted_before_they_are_decoded(tmp_path: Path) -> None:
    large = bomb(13_300, 13_300)  # 177 megapixels, which Pillow itself lets pass
    with (
        pytest.raises(ValueError, match=r"13300 x 13300 pixels are 176,890,000, the limit is 50,000,000"),
        opened_picture(large),
    ):
        pass
    column = column_of([png(), png((30, 30))])
    assert decoded(column, 8, tmp_path, pixels=900).shape == (2, 3, 8, 8)
    with pytest.raises(
        DataError, match=re.escape("row 1: not a readable picture: 30 x 30 pixels are 900, the limit is 899")
    ):
        decoded(column, 9, tmp_path, pixels=899)


def test_only_formats_of_pictures_are_opened() -> None:
    script = (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"  # would be run by a program
    )
    with pytest.raises(OSError, match="cannot identify"), opened_picture(script):
        pass
