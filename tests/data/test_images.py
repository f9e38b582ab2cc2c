"""Images: files that rows name, sizes and depths, and augmentations, each against a slow version or a case by hand."""

from __future__ import annotations

import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from item_tables import column_of, encoded
from polyfed.core.errors import DataError
from polyfed.core.randomness import generator
from polyfed.data import images
from polyfed.data.cache import Decoding, decoded
from polyfed.data.sources.stored import Parquet

ALL = [images.Rotation(), images.Rotation(degrees=90), images.RandomCrop(), images.Shift(), images.Flip()]
ALL += [images.Erase(p=1)]


def batch(b: int = 6, h: int = 12, w: int = 16) -> Tensor:
    return torch.randint(0, 256, (b, 3, h, w), dtype=torch.uint8, generator=generator("images"))


@pytest.mark.parametrize("augmentation", ALL, ids=lambda a: type(a).__name__)
class TestEvery:
    def test_keeps_shape_type_and_input(self, augmentation: images.Augmentation) -> None:
        for x in (batch(), batch().float(), batch(0), batch(1)):
            before = x.clone()
            y = augmentation(x, generator(1))
            assert y.shape == x.shape
            assert y.dtype == x.dtype
            assert torch.equal(x, before)

    def test_depends_on_its_generator_alone(self, augmentation: images.Augmentation) -> None:
        first = augmentation(batch(), generator(1))
        state = torch.get_rng_state()
        assert torch.equal(first, augmentation(batch(), generator(1)))
        assert torch.equal(state, torch.get_rng_state())
        assert not torch.equal(first, augmentation(batch(), generator(2)))

    def test_every_image_has_a_draw_of_its_own(self, augmentation: images.Augmentation) -> None:
        same = batch(1).expand(32, -1, -1, -1).contiguous()
        assert len(augmentation(same, generator(1)).flatten(1).unique(dim=0)) > 1

    def test_pixels_stay_within_bounds(self, augmentation: images.Augmentation) -> None:
        y = augmentation(batch().float(), generator(1))
        assert y.min() >= 0
        assert y.max() <= 255.001


@pytest.mark.parametrize(
    "augmentation",
    [
        *(images.Rotation(degrees=0), images.RandomCrop(scale=(1, 1), ratio=(4 / 3, 4 / 3))),
        *(images.Shift(pixels=0), images.Flip(p=0), images.Erase(p=0)),
    ],
    ids=lambda a: type(a).__name__,
)
def test_zero_strength_changes_nothing(augmentation: images.Augmentation) -> None:
    assert torch.equal(augmentation(batch(), generator(1)), batch())


def test_flip_mirrors_whole_images() -> None:
    x = batch(40)
    y = images.Flip()(x, generator(1))
    kept, mirrored = (y == x).flatten(1).all(1), (y == x.flip(3)).flatten(1).all(1)
    assert (kept ^ mirrored).all()
    assert 10 < int(mirrored.sum()) < 30
    assert torch.equal(images.Flip(p=1)(x, generator(1)), x.flip(3))


def test_shift_equals_a_loop_over_pixels() -> None:
    x, y = batch(), images.Shift(pixels=3)(batch(), generator(1))
    down, right = torch.randint(7, (2, len(x)), generator=generator(1)) - 3
    slow = torch.zeros_like(x)
    for i in range(len(x)):
        for row in range(12):
            for column in range(16):
                source = row + int(down[i]), column + int(right[i])
                if 0 <= source[0] < 12 and 0 <= source[1] < 16:
                    slow[i, :, row, column] = x[i, :, source[0], source[1]]
    assert torch.equal(y, slow)


def test_boxes_keep_area_shape_and_bounds() -> None:
    top, left, h, w = images.crop_boxes(2000, (200, 300), (0.1, 0.6), (0.5, 2.0), generator(1)).double().unbind(1)
    share = h * w / (200 * 300)
    assert (share > 0.098).all()
    assert (share < 0.61).all()
    assert ((w / h > 0.49) & (w / h < 2.03)).all()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + h).max() == 200
    assert (left + w).max() == 300
    assert (top == 0).any(), "every place is possible"


def test_box_that_never_fits() -> None:
    assert not images.crop_boxes(5, (10, 10), (1.0, 1.0), (3.0, 3.0), generator(1))[:, 2:].any()
    assert torch.equal(images.RandomCrop(scale=(1, 1), ratio=(3, 3))(batch(), generator(1)), batch())
    assert torch.equal(images.Erase(p=1, scale=(1, 1), ratio=(3, 3))(batch(), generator(1)), batch())


def test_crop_of_a_ramp_is_a_slower_ramp() -> None:
    h, w = 12, 16
    y = images.RandomCrop(scale=(0.3, 0.6))(torch.arange(w).float().expand(5, 3, h, w).contiguous(), generator(1))
    boxes = images.crop_boxes(5, (h, w), (0.3, 0.6), (0.75, 4 / 3), generator(1))
    for picture, (_, left, _, width) in zip(y, boxes.tolist(), strict=True):
        for column in range(w):
            place = min(max((column + 0.5) * width / w - 0.5, 0), width - 1)
            assert picture[0, 0, column].item() == pytest.approx(left + place, abs=1e-4)


def test_rotation_equals_a_loop_over_pixels() -> None:
    x = batch(3).float()
    y = images.Rotation(degrees=40)(x, generator(1))
    angles = (torch.rand(3, generator=generator(1)) * 2 - 1) * math.radians(40)
    h, w = 12, 16
    for i, angle in enumerate(angles.tolist()):
        for row in range(h):
            for column in range(w):
                dy, dx = row - (h - 1) / 2, column - (w - 1) / 2
                sy = math.sin(angle) * dx + math.cos(angle) * dy + (h - 1) / 2
                sx = math.cos(angle) * dx - math.sin(angle) * dy + (w - 1) / 2
                if min(sy % 1 - 0.5, sx % 1 - 0.5, key=abs) ** 2 < 1e-8:
                    continue  # exactly between two pixels
                inside = -0.5 < sy < h - 0.5 and -0.5 < sx < w - 0.5
                expected = x[i, :, round(sy), round(sx)] if inside else torch.zeros(3)
                assert torch.equal(y[i, :, row, column], expected)


@pytest.mark.parametrize("resampling", ["nearest", "bilinear"])
def test_quarter_turn_is_exact(resampling: str) -> None:
    x = batch(2, 8, 8).float()
    grid = images.turned_grid(torch.tensor([math.pi / 2, -math.pi / 2]), 8, 8)
    y = F.grid_sample(x, grid, resampling, align_corners=False)
    torch.testing.assert_close(y, torch.stack([x[0].rot90(1, (1, 2)), x[1].rot90(-1, (1, 2))]), atol=1e-3, rtol=0)


def test_erase_cuts_one_box_out_of_some() -> None:
    y = images.Erase(p=0.3)(torch.ones(400, 3, 20, 20), generator(1))
    holes = y[:, 0] == 0
    assert torch.equal(y, (~holes).float().unsqueeze(1).expand_as(y)), "all channels alike, 0 or unchanged"
    hit = holes.flatten(1).any(1)
    assert 80 < int(hit.sum()) < 160
    for hole in holes[hit]:
        rows, columns = hole.any(1), hole.any(0)
        assert torch.equal(hole, rows[:, None] & columns[None, :])
        assert int(rows.sum()) == int(rows.nonzero().max() - rows.nonzero().min()) + 1
        assert int(columns.sum()) == int(columns.nonzero().max() - columns.nonzero().min()) + 1
        assert 0.01 < float(hole.float().mean()) < 0.36


@pytest.mark.parametrize("name", ["half", "imagenet", "cifar100"])
def test_normalised_equals_the_formula(name: str) -> None:
    x = batch()
    y = images.normalised(x, name)
    mean, std = images.MEAN_STD[name]
    for channel in range(3):
        expected = (x[:, channel].double() / 255 - mean[channel]) / std[channel]
        torch.testing.assert_close(y[:, channel].double(), expected, atol=1e-5, rtol=0)
    assert y.dtype == torch.float32


def test_short_forms() -> None:
    settings = images.Augment.model_validate({"rotate": 15, "crop": 0.4, "shift": 2, "flip": True, "erase": 0.3})
    rotate, crop, shift = images.Rotation(degrees=15), images.RandomCrop(scale=(0.4, 1)), images.Shift(pixels=2)
    long = images.Augment(rotate=rotate, crop=crop, shift=shift, flip=images.Flip(), erase=images.Erase(p=0.3))
    assert settings == long
    assert images.Augment.model_validate({"flip": False, "crop": None}).flip is None
    assert images.Augment.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": {"scale": (0.9, 0.1)}}, "needs 0 < least <= greatest, not 0.9 and 0.1"),
        ({"erase": 1.5}, "less than or equal to 1"),
    ],
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        images.Augment.model_validate(settings)


def test_order_of_changes() -> None:
    augment = images.Augment(shift=images.Shift(pixels=2), flip=images.Flip(p=1), erase=images.Erase(p=1))
    g, h = generator(1), generator(1)
    assert torch.equal(augment.moved(batch(), g), images.Shift(pixels=2)(batch(), h).flip(3))
    assert augment.changes == [augment.shift, augment.flip, augment.erase]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        (".heic", "magick mogrify -format png *.heic"),
        ("scan.NII.gz", "med2image -i 1.nii.gz "),
        (".gz", "unpack it"),
        (".dcm", "dcmj2pnm --write-png"),
        (".mp3", "ffmpeg -i 1.mp3 1.wav"),
        ("without ending", "convert it to .png"),
    ],
)
def test_a_file_that_is_not_read_has_a_command_that_converts_it(name: str, command: str) -> None:
    assert command in images.remedy_of(name)


# ---- files, sizes, and depths of other than 8 bits


def png(size: tuple[int, int] = (4, 4)) -> bytes:
    return encoded(Image.new("L", size, 7))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes with the header of a large image."""

    def chunk(form: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + form + content + struct.pack(">I", zlib.crc32(form + content))

    header, pixels = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0), zlib.compress(b"\0" * 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def named(path: object) -> dict[str, Any]:
    return {"bytes": None, "path": str(path)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set's folder with an image in it, and one next to it."""
    made = tmp_path / "set"
    (made / "deep").mkdir(parents=True)
    (made / "deep" / "a.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png())
    return made


def test_a_path_is_one_of_the_data_sets_own_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for path in ("deep/a.png", "./deep/../deep/a.png", folder / "deep" / "a.png"):
        assert images.image_bytes(named(path), folder) == png()
    assert images.image_bytes(named("deep/a.png"), Path("set")) == png()


@pytest.mark.parametrize(
    "path", ["../secret.png", "deep/../../secret.png", "/etc/hostname", "/dev/zero", "link.png", "far/secret.png"]
)
def test_a_path_that_leaves_the_folder_is_refused(folder: Path, path: str) -> None:
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "far").symlink_to(folder.parent)
    with pytest.raises(ValueError, match="the path leaves the data set's folder"):
        images.image_bytes(named(path), folder)


def test_pipes_and_folders_are_refused_at_once(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")  # reading it would wait for a writer
    with pytest.raises(ValueError, match="not that of a regular file"):
        images.image_bytes(named("pipe.png"), folder)
    with pytest.raises((ValueError, OSError)):
        images.image_bytes(named("deep"), folder)
    with pytest.raises(ValueError, match="no folder of files"):
        images.image_bytes(named(folder / "deep" / "a.png"), None)
    with pytest.raises(ValueError, match="neither bytes nor a path but str"):
        images.image_bytes("a.png", folder)


def test_a_large_file_is_not_read(folder: Path) -> None:
    with (folder / "sparse.png").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"1,099,511,627,776 bytes, the limit is .*\(data\.max_pixels\)"):
        images.image_bytes(named("sparse.png"), folder)


def test_the_rows_of_a_parquet_folder_name_files_below_it(folder: Path, tmp_path: Path) -> None:
    rows = [named("deep/a.png"), named("../secret.png")]
    pq.write_table(pa.table({"image": rows[:1]}), folder / "train.parquet")
    pq.write_table(pa.table({"image": rows}), folder / "test.parquet")
    source = Parquet(path="set", columns={"image": "image"})

    def pictures(split: str) -> np.ndarray[Any, Any]:
        column = source.open(split, name="pets", data_dir=tmp_path).modality("image")
        return decoded(column, Decoding(8), tmp_path / "cache")

    assert pictures("train").shape == (1, 3, 8, 8)
    message = r"set/test, column 'image', row 1 \(path '\.\./secret\.png'\).*leaves the data"
    with pytest.raises(DataError, match=message):
        pictures("test")
    assert [path for path in (tmp_path / "cache").iterdir() if ".tmp" in path.name] == []


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pixels_are_counted_before_they_are_decoded(tmp_path: Path) -> None:
    large = bomb(13_300, 13_300)  # 177 megapixels, which Pillow itself lets pass
    message = "13300 x 13300 pixels are 176,890,000, the limit is 50,000,000"
    with pytest.raises(ValueError, match=message), images.opened_image(large):
        pass
    column = column_of([png(), png((30, 30))])
    assert decoded(column, Decoding(8, pixels=900), tmp_path).shape == (2, 3, 8, 8)
    with pytest.raises(DataError, match="row 1: not a readable image: 30 x 30 pixels are 900, the limit is 899"):
        decoded(column, Decoding(9, pixels=899), tmp_path)


def test_only_formats_of_images_are_opened() -> None:
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"  # a program would run it
    with pytest.raises(OSError, match="cannot identify"), images.opened_image(script):
        pass


RAMP = np.linspace(0, 255, 64).reshape(8, 8).round()


def tiff(values: np.ndarray) -> bytes:
    return encoded(Image.fromarray(values), "TIFF")


def pixels(data: bytes) -> np.ndarray:
    return images.decode(data, 8, "squash", "bilinear")[0].astype(int)


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


def test_nan_is_dark_and_a_constant_is_grey() -> None:
    values = (RAMP / 255).astype(np.float32)
    values[0, :3] = np.nan, -np.inf, np.inf
    assert pixels(tiff(values))[0, :3].tolist() == [0, 0, 255]
    assert set(pixels(tiff(np.full((8, 8), 1e6, np.float32))).ravel()) == {128}
    assert set(pixels(tiff(np.full((8, 8), np.nan, np.float32))).ravel()) == {0}


def test_prepare_reports_scaled_and_left_out_images(tmp_path: Path, cli: Any) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    scans = {f"p{k}": tiff((RAMP * 16 + k).clip(0, 4095).astype(np.uint16)) for k in range(10)}
    scans["broken"] = b"no image"
    for name, data in scans.items():
        (folder / f"{name}.tif").write_bytes(data)
    rows = ["file_name,caption", *(f"{name}.tif,a caption of {name}" for name in (*scans, "gone"))]
    (folder / "captions.csv").write_text("\n".join(rows))
    code, lines, errors = cli("prepare", folder, tmp_path / "out")
    assert (code, errors) == (0, "")
    lines = " ".join(lines.split())
    assert "Nothing to look at" not in lines
    for line in ("from 12 bits: 10", "without an image, left out 1 gone.tif", "cannot be read, left out 1 broken.tif"):
        assert line in lines
    report = (tmp_path / "out" / "report.json").read_text()
    assert "object at 0x" not in report
    assert "gone.tif" in report
