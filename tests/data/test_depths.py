"""Pictures of other depths than 8 bits come out as their author meant them, neither black nor white."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polyfed.data.images import decode

RAMP = np.linspace(0, 255, 64).reshape(8, 8).round()


def encoded(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def tiff(values: np.ndarray) -> bytes:
    return encoded(Image.fromarray(values), "TIFF")


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
        encoded(Image.fromarray((RAMP * 16).astype(np.uint16)), "PNG"),
        encoded(Image.fromarray((RAMP * 4).astype(np.uint16)), "PNG"),
        encoded(Image.fromarray((RAMP * 257).astype(np.uint16)), "PNG"),
        encoded(Image.fromarray(RAMP.astype(np.uint8)).convert("P"), "PNG"),
        encoded(Image.fromarray(RAMP.astype(np.uint8)).convert("LA"), "PNG"),
        encoded(Image.fromarray(RAMP.astype(np.uint8)).convert("CMYK"), "TIFF"),
    ],
    ids=lambda data: str(len(data)),
)
def test_a_ramp_stays_a_ramp(data: bytes) -> None:
    assert np.abs(pixels(data) - RAMP).max() <= 1


def test_sixteen_bits_in_either_order() -> None:
    values = (RAMP * 257).astype(">u2")
    image = Image.frombytes("I;16B", (8, 8), values.tobytes())
    assert np.abs(pixels(encoded(image, "TIFF")) - RAMP).max() <= 1


def test_what_is_no_number_is_dark_and_one_value_is_grey() -> None:
    values = (RAMP / 255).astype(np.float32)
    values[0, :3] = np.nan, -np.inf, np.inf
    assert pixels(tiff(values))[0, :3].tolist() == [0, 0, 255]
    assert set(pixels(tiff(np.full((8, 8), 1e6, np.float32))).ravel()) == {128}
    assert set(pixels(tiff(np.full((8, 8), np.nan, np.float32))).ravel()) == {0}


def folder_of(path: Path, **files: Callable[[Path], object]) -> Path:
    path.mkdir()
    rows = ["file_name,caption"]
    for name, write in files.items():
        write(path / f"{name}.tif")
        rows.append(f"{name}.tif,a caption of {name}")
    (path / "captions.csv").write_text("\n".join(rows))
    return path


def test_prepare_says_what_it_scaled_and_left_out(tmp_path: Path, cli: Any) -> None:
    folder = folder_of(
        tmp_path / "scans",
        **{
            f"p{k}": lambda path, k=k: path.write_bytes(tiff((RAMP * 16 + k).clip(0, 4095).astype(np.uint16)))
            for k in range(10)
        },
        broken=lambda path: path.write_bytes(b"no picture"),
    )
    with (folder / "captions.csv").open("a") as rows:
        rows.write("\ngone.tif,a caption of gone\n")
    code, told, errors = cli("prepare", folder, tmp_path / "out")
    assert (code, errors) == (0, "")
    told = " ".join(told.split())
    assert "Nothing to look at" not in told
    for line in ("from 12 bits: 10", "are not there, left out 1 gone.tif", "cannot be read, left out 1 broken.tif"):
        assert line in told
    report = (tmp_path / "out" / "report.json").read_text()
    assert "object at 0x" not in report
    assert "gone.tif" in report


def test_one_picture_is_too_few(tmp_path: Path, cli: Any) -> None:
    folder = folder_of(tmp_path / "one", a=lambda path: path.write_bytes(tiff(RAMP.astype(np.uint8))))
    code, _, errors = cli("prepare", folder, tmp_path / "out")
    assert code == 2
    assert "has 1 items, too few to draw validation and test from" in " ".join(errors.split())
    assert not (tmp_path / "out").exists()
