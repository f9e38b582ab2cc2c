"""The views of images as pixels and as masks."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from item_tables import column_of, in_memory, noise, struct_of
from polyfed.core.errors import ConfigError, DataError
from polyfed.core.randomness import generator
from polyfed.data.assembly import assemble
from polyfed.data.images import Augment
from polyfed.data.samples import Inputs, Samples
from polyfed.data.source import Column
from polyfed.data.view import DataContext
from polyfed.data.views.pixels import Masks, Pixels


def column(n: int = 6, nested: bool = False) -> Column:
    values = [struct_of(noise(seed, 16, 16)) for seed in range(n)]
    return column_of([values[:2], values[2:]] if nested else values, f"n{nested}")


@pytest.fixture
def context(tmp_path: Path) -> DataContext:
    return DataContext(cache=tmp_path)


def opened(context: DataContext, **settings: object) -> Inputs:
    return Pixels.model_validate({"size": 16} | settings).open(column(), "image", context)


def test_evaluation_view_equals_the_formula(context: DataContext) -> None:
    inputs = opened(context)
    rows = torch.tensor([3, 0, 3])
    result = inputs(rows)
    assert result.dtype == torch.float32
    assert result.shape == (3, 3, 16, 16)
    assert len(inputs) == 6
    for got, row in zip(result, rows.tolist(), strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(column().values[row].as_py()["bytes"]))).transpose(2, 0, 1)
        torch.testing.assert_close(got, torch.from_numpy((pixels / 255 - 0.5) / 0.5).float())
    assert torch.equal(inputs(rows), result)


def test_augments_only_with_a_generator(context: DataContext) -> None:
    inputs = opened(context, augment={"shift": 3, "flip": True, "erase": 0.5})
    plain = opened(context)
    rows = torch.arange(6)
    assert torch.equal(inputs(rows), plain(rows))
    assert torch.equal(inputs(rows, generator(1)), inputs(rows, generator(1)))
    assert not torch.equal(inputs(rows, generator(1)), plain(rows))
    assert torch.equal(plain(rows, generator(1)), plain(rows)), "without augmentations both views are the same"


def test_no_rows(context: DataContext) -> None:
    none = torch.arange(0)
    inputs = opened(context, augment={"shift": 3, "crop": True, "rotate": True, "erase": 0.5})
    assert inputs(none).shape == (0, 3, 16, 16)
    assert inputs(none, generator(1)).shape == (0, 3, 16, 16)


def masks_of(*masks: np.ndarray) -> Column:
    return column_of([struct_of(Image.fromarray(mask.astype(np.uint8))) for mask in masks], f"f{len(masks)}")


def test_masks_are_0_and_1_by_the_threshold(tmp_path: Path) -> None:
    grey = np.repeat(np.array([[0, 127], [128, 255]]), 8, 0).repeat(8, 1)
    result = Masks(size=16).open(masks_of(grey, 255 - grey), "mask", DataContext(tmp_path))(torch.tensor([1, 0]))
    assert result.dtype == torch.uint8
    assert result.shape == (2, 16, 16)
    np.testing.assert_array_equal(result[1].numpy(), (grey > 127).astype(np.uint8))
    low = Masks(size=16, threshold=100).open(masks_of(grey), "mask", DataContext(tmp_path))
    np.testing.assert_array_equal(low(torch.tensor([0]))[0].numpy(), (grey > 100).astype(np.uint8))


@pytest.mark.parametrize("size", [8, 24, 37])
def test_resizing_takes_the_nearest_pixel(tmp_path: Path, size: int) -> None:
    """A checkerboard of single pixels stays black and white; any blending filter would make it grey."""
    board = 255 * (np.indices((32, 32)).sum(0) % 2)
    rows = Masks(size=size).open(masks_of(board), "mask", DataContext(tmp_path))
    raw = np.asarray(rows.images)  # type: ignore[attr-defined]
    assert set(np.unique(raw)) <= {0, 255}
    centres = (np.arange(size) + 0.5) * 32 / size
    clear = np.flatnonzero(centres % 1 > 1e-6)  # between two pixels either will do
    nearest = centres[clear].astype(int)
    np.testing.assert_array_equal(raw[0, 0][np.ix_(clear, clear)], board[np.ix_(nearest, nearest)])


def test_masks_and_images_have_caches_of_their_own(tmp_path: Path) -> None:
    given, context = masks_of(255 * np.eye(16)), DataContext(tmp_path)
    Pixels(size=8).open(given, "image", context)
    Masks(size=8).open(given, "mask", context)
    Masks(size=8, threshold=3).open(given, "mask", context)
    assert len(list(tmp_path.glob("*.npy"))) == 2


def test_a_missing_or_broken_mask_is_named(tmp_path: Path) -> None:
    for value, message in ((b"nothing", "column 'x', row 0: not a readable image"), (None, "row 0: no value")):
        with pytest.raises(DataError, match=message):
            Masks(size=16).open(column_of(pa.array([value], pa.binary())), "mask", DataContext(tmp_path))


@pytest.mark.parametrize(("ignore", "outside"), [(None, 0), (255, 255)])
def test_what_comes_in_has_no_class(ignore: int | None, outside: int, tmp_path: Path) -> None:
    view = Masks.model_validate({"size": 16, "classes": 150, "ignore": ignore, "augment": {"shift": 8}})
    rows = view.open(masks_of(np.full((16, 16), 149), np.full((16, 16), 7)), "mask", DataContext(tmp_path))
    for seed in range(3):
        moved = rows(torch.arange(2), torch.Generator().manual_seed(seed))
        assert moved.dtype == torch.uint8
        for mask, number in zip(moved, (149, 7), strict=True):
            assert {*mask.unique().tolist()} == {number, outside}


def test_what_moves_does_not_grow_with_classes_that_are_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    monkeypatch.setattr(Augment, "moved", lambda self, x, generator: shapes.append(x.shape) or x)
    rows = Masks(size=16, classes=150).open(masks_of(np.eye(16) * 149, np.eye(16) * 7), "mask", DataContext(tmp_path))
    eye = torch.eye(16, dtype=torch.uint8)
    assert torch.equal(rows(torch.arange(2), torch.Generator()), torch.stack([149 * eye, 7 * eye]))
    assert rows(torch.arange(0), torch.Generator()).shape == (0, 16, 16)
    assert shapes == [(2, 2, 16, 16), (0, 1, 16, 16)]


MOVES = {"rotate": 30, "crop": 0.3, "shift": 3, "flip": True, "erase": 0.5}


def pictures_and_masks(folder: Path, **changes: Any) -> Samples:
    """Images that are black and white as their masks."""
    rng = np.random.default_rng(0)
    blocks = 255 * rng.integers(0, 2, (6, 4, 4)).repeat(8, 1).repeat(8, 2)
    table = pa.table({"id": list("abcdef"), "image": values_of(blocks), "mask": values_of(blocks)})
    split = in_memory(table, "id", columns={"image": "image"}, targets={})
    view = Pixels(size=32, resampling="bilinear", augment=changes)
    return assemble(split, {"image": view}, DataContext(folder), lazy={"mask": Masks(of="image")})


def values_of(blocks: np.ndarray) -> pa.Array:
    return pa.array([struct_of(Image.fromarray(block.astype(np.uint8))) for block in blocks])


def test_a_mask_moves_as_its_image(tmp_path: Path) -> None:
    samples = pictures_and_masks(tmp_path, **(MOVES | {"erase": False}))
    still, moved = (samples.batch(torch.arange(6), stream) for stream in (None, torch.Generator().manual_seed(1)))
    assert not torch.equal(still.targets["mask"], moved.targets["mask"])
    for batch in (still, moved):
        assert torch.equal(batch.targets["mask"].bool(), batch.inputs["image"][:, 0] > 0)


def test_masks_leave_the_draws_of_images_as_they_are(tmp_path: Path) -> None:
    samples, index = pictures_and_masks(tmp_path, **MOVES), torch.tensor([4, 0])
    with_masks, without = (
        each.batch(index, torch.Generator().manual_seed(2)).inputs["image"]
        for each in (samples, samples.without_targets(["mask"]))
    )
    assert torch.equal(with_masks, without)


def test_the_mask_of_a_lacking_image_is_empty_and_draws_nothing(tmp_path: Path) -> None:
    samples = pictures_and_masks(tmp_path, crop=0.3)
    rows = {**samples.rows, "image": torch.tensor([0, -1, 2, 3, 4, 5])}
    lacking = replace(samples, rows=rows).batch(torch.arange(6), torch.Generator().manual_seed(3))
    others = samples.batch(torch.tensor([0, 2, 3, 4, 5]), torch.Generator().manual_seed(3))
    assert torch.equal(lacking.targets["mask"][[0, 2, 3, 4, 5]], others.targets["mask"])
    assert not lacking.targets["mask"][1].any()


def test_masks_without_their_images_are_refused(tmp_path: Path) -> None:
    split = in_memory(pa.table({"id": ["a"], "mask": ["x"]}), "id", columns={}, targets={})
    with pytest.raises(ConfigError, match="masks of 'image' need"):
        assemble(split, {}, DataContext(tmp_path), lazy={"mask": Masks(of="image")})
