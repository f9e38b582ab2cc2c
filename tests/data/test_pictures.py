"""Images of rows that somebody else wrote: files that they may name, sizes, and depths of other than 8 bits."""

from __future__ import annotations

import io
import os
import re
import struct
import zlib
from collections.abc import Callable
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
from polyfed.data.images import decode, image_bytes, opened_image
from polyfed.data.sources.stored import Parquet


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
    """A data set's folder with an image in it, and one beside it."""
    made = tmp_path / "set"
    (made / "deep").mkdir(parents=True)
    (made / "deep" / "a.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png())
    return made


def test_a_path_is_one_of_the_data_sets_own_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for path in ("deep/a.png", "./deep/../deep/a.png", folder / "deep" / "a.png"):
        assert image_bytes(named(path), folder) == png()
    assert image_bytes(named("deep/a.png"), Path("set")) == png()


@pytest.mark.parametrize(
    "path", ["../secret.png", "deep/../../secret.png", "/etc/hostname", "/dev/zero", "link.png", "far/secret.png"]
)
def test_a_path_that_leaves_the_folder_is_refused(folder: Path, path: str) -> None:
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "far").symlink_to(folder.parent)
    with pytest.raises(ValueError, match="the path leaves the data set's folder"):
        image_bytes(named(path), folder)


def test_what_is_no_regular_file_is_refused_at_once(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")  # reading it would wait for a writer
    with pytest.raises(ValueError, match="not that of a regular file"):
        image_bytes(named("pipe.png"), folder)
    with pytest.raises((ValueError, OSError)):
        image_bytes(named("deep"), folder)
    with pytest.raises(ValueError, match="no folder of files"):
        image_bytes(named(folder / "deep" / "a.png"), None)
    with pytest.raises(ValueError, match="neither bytes nor a path but str"):
        image_bytes("a.png", folder)


def test_a_large_file_is_not_read(folder: Path) -> None:
    with (folder / "sparse.png").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"1,099,511,627,776 bytes, the limit is .*\(data\.max_pixels\)"):
        image_bytes(named("sparse.png"), folder)


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
        opened_image(large),
    ):
        pass
    column = column_of([png(), png((30, 30))])
    assert decoded(column, 8, tmp_path, pixels=900).shape == (2, 3, 8, 8)
    with pytest.raises(
        DataError, match=re.escape("row 1: not a readable image: 30 x 30 pixels are 900, the limit is 899")
    ):
        decoded(column, 9, tmp_path, pixels=899)


def test_only_formats_of_pictures_are_opened() -> None:
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"  # a program would run it
    with pytest.raises(OSError, match="cannot identify"), opened_image(script):
        pass


RAMP = np.linspace(0, 255, 64).reshape(8, 8).round()


def stored_as(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def tiff(values: np.ndarray) -> bytes:
    return stored_as(Image.fromarray(values), "TIFF")


def pixels(data: bytes) -> np.ndarray:
    return decode(data, 8, "squash", "bilinear")[0].astype(int)


@pytest.mark.parametrize(
    "data",
    [
        tiff((RAMP / 255).astype(np.float32)),
        tiff(RAMP.astype(np.float32)),
        tiff((RAMP * 1e30 - 5e30).astype(np.float32)),
        tiff(RAMP.astype(np.int32)),
        tiff((RAMP * 1_000_000 - 7).astype(np.int32)),
        tiff((RAMP * 16).astype(np.uint16)),
        stored_as(Image.fromarray((RAMP * 16).astype(np.uint16)), "PNG"),
        stored_as(Image.fromarray((RAMP * 4).astype(np.uint16)), "PNG"),
        stored_as(Image.fromarray((RAMP * 257).astype(np.uint16)), "PNG"),
        stored_as(Image.fromarray(RAMP.astype(np.uint8)).convert("P"), "PNG"),
        stored_as(Image.fromarray(RAMP.astype(np.uint8)).convert("LA"), "PNG"),
        stored_as(Image.fromarray(RAMP.astype(np.uint8)).convert("CMYK"), "TIFF"),
    ],
    ids=lambda data: str(len(data)),
)
def test_a_ramp_stays_a_ramp(data: bytes) -> None:
    assert np.abs(pixels(data) - RAMP).max() <= 1


def test_what_is_no_number_is_dark_and_one_value_is_grey() -> None:
    values = (RAMP / 255).astype(np.float32)
    values[0, :3] = np.nan, -np.inf, np.inf
    assert pixels(tiff(values))[0, :3].tolist() == [0, 0, 255]
    assert set(pixels(tiff(np.full((8, 8), 1e6, np.float32))).ravel()) == {128}
    assert set(pixels(tiff(np.full((8, 8), np.nan, np.float32))).ravel()) == {0}


def scans_in(path: Path, **files: Callable[[Path], object]) -> Path:
    path.mkdir()
    rows = ["file_name,caption"]
    for name, write in files.items():
        write(path / f"{name}.tif")
        rows.append(f"{name}.tif,a caption of {name}")
    (path / "captions.csv").write_text("\n".join(rows))
    return path


def test_prepare_says_what_it_scaled_and_left_out(tmp_path: Path, cli: Any) -> None:
    folder = scans_in(
        tmp_path / "scans",
        **{
            f"p{k}": lambda path, k=k: path.write_bytes(tiff((RAMP * 16 + k).clip(0, 4095).astype(np.uint16)))
            for k in range(10)
        },
        broken=lambda path: path.write_bytes(b"no image"),
    )
    with (folder / "captions.csv").open("a") as rows:
        rows.write("\ngone.tif,a caption of gone\n")
    code, told, errors = cli("prepare", folder, tmp_path / "out")
    assert (code, errors) == (0, "")
    told = " ".join(told.split())
    assert "Nothing to look at" not in told
    for line in ("from 12 bits: 10", "without an image, left out 1 gone.tif", "cannot be read, left out 1 broken.tif"):
        assert line in told
    report = (tmp_path / "out" / "report.json").read_text()
    assert "object at 0x" not in report
    assert "gone.tif" in report
