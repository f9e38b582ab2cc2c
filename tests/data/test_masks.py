from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from item_tables import column_of, struct_of
from polyfed.core.errors import DataError
from polyfed.data.source import Column
from polyfed.data.view import DataContext
from polyfed.data.views.masks import Masks
from polyfed.data.views.pixels import Pixels


def column(*masks: np.ndarray) -> Column:
    return column_of([struct_of(Image.fromarray(mask.astype(np.uint8))) for mask in masks], f"f{len(masks)}")


def test_masks_are_0_and_1_by_the_threshold(tmp_path: Path) -> None:
    grey = np.repeat(np.array([[0, 127], [128, 255]]), 8, 0).repeat(8, 1)
    opened = Masks(size=16).open(column(grey, 255 - grey), "mask", DataContext(tmp_path))
    found = opened(torch.tensor([1, 0]))
    assert found.dtype == torch.uint8
    assert found.shape == (2, 16, 16)
    np.testing.assert_array_equal(found[1].numpy(), (grey > 127).astype(np.uint8))
    low = Masks(size=16, threshold=100).open(column(grey), "mask", DataContext(tmp_path))
    np.testing.assert_array_equal(low(torch.tensor([0]))[0].numpy(), (grey > 100).astype(np.uint8))


@pytest.mark.parametrize("size", [8, 24, 37])
def test_resizing_takes_the_nearest_pixel(tmp_path: Path, size: int) -> None:
    """A checkerboard of single pixels stays black and white; any blending filter would make it grey."""
    board = 255 * (np.indices((32, 32)).sum(0) % 2)
    rows = Masks(size=size).open(column(board), "mask", DataContext(tmp_path))
    raw = np.asarray(rows.pictures)  # type: ignore[attr-defined]
    assert set(np.unique(raw)) <= {0, 255}
    centres = (np.arange(size) + 0.5) * 32 / size
    clear = np.flatnonzero(centres % 1 > 1e-6)  # between two pixels either will do
    nearest = centres[clear].astype(int)
    np.testing.assert_array_equal(raw[0, 0][np.ix_(clear, clear)], board[np.ix_(nearest, nearest)])


def test_masks_and_pictures_have_caches_of_their_own(tmp_path: Path) -> None:
    given, context = column(255 * np.eye(16)), DataContext(tmp_path)
    Pixels(size=8).open(given, "image", context)
    Masks(size=8).open(given, "mask", context)
    Masks(size=8, threshold=3).open(given, "mask", context)
    assert len(list(tmp_path.glob("*.npy"))) == 2


def test_a_missing_or_broken_mask_is_named(tmp_path: Path) -> None:
    for value, message in ((b"nothing", "column 'x', row 0: not a readable picture"), (None, "row 0: no value")):
        with pytest.raises(DataError, match=message):
            Masks().open(column_of(pa.array([value], pa.binary())), "mask", DataContext(tmp_path))


def test_spec(tmp_path: Path) -> None:
    assert Masks(size=24).spec("mask", DataContext(tmp_path)).shape == (24, 24)
