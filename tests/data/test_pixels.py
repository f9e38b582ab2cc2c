"""The view of pictures as pixels."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from item_tables import column_of, noise, struct_of
from polyfed.core.randomness import generator
from polyfed.data.samples import Inputs
from polyfed.data.source import Column
from polyfed.data.view import DataContext
from polyfed.data.views.pixels import Pixels


def column(n: int = 6, nested: bool = False) -> Column:
    values = [struct_of(noise(seed, 16, 16)) for seed in range(n)]
    return column_of([values[:2], values[2:]] if nested else values, f"n{nested}")


@pytest.fixture
def context(tmp_path: Path) -> DataContext:
    return DataContext(cache=tmp_path)


def opened(context: DataContext, **settings: object) -> Inputs:
    return Pixels.model_validate({"size": 16} | settings).open(column(), "picture", context)


def test_evaluation_view_equals_the_formula(context: DataContext) -> None:
    inputs = opened(context)
    rows = torch.tensor([3, 0, 3])
    found = inputs(rows)
    assert found.dtype == torch.float32
    assert found.shape == (3, 3, 16, 16)
    assert len(inputs) == 6
    for got, row in zip(found, rows.tolist(), strict=True):
        data = column().values[row].as_py()["bytes"]
        pixels = np.asarray(Image.open(io.BytesIO(data))).transpose(2, 0, 1)
        torch.testing.assert_close(got, torch.from_numpy((pixels / 255 - 0.5) / 0.5).float())
    assert torch.equal(inputs(rows), found)


def test_augments_only_with_a_generator(context: DataContext) -> None:
    inputs = opened(context, augment={"shift": 3, "flip": True, "erase": 0.5})
    plain = opened(context)
    rows = torch.arange(6)
    assert torch.equal(inputs(rows), plain(rows))
    assert torch.equal(inputs(rows, generator(1)), inputs(rows, generator(1)))
    assert not torch.equal(inputs(rows, generator(1)), plain(rows))
    assert torch.equal(plain(rows, generator(1)), plain(rows)), "without augmentations both views are the same"


def test_changes_never_reach_the_cache(context: DataContext) -> None:
    inputs = opened(context)
    rows = torch.arange(6)
    before = inputs(rows)
    inputs(rows).zero_()
    assert torch.equal(inputs(rows), before)


def test_nested_pictures_are_flattened(context: DataContext) -> None:
    nested = Pixels(size=16).open(column(nested=True), "picture", context)
    rows = torch.arange(6)
    assert torch.equal(nested(rows), opened(context)(rows))


def test_no_rows(context: DataContext) -> None:
    none = torch.arange(0)
    inputs = opened(context, augment={"shift": 3, "crop": True, "rotate": True, "erase": 0.5})
    assert inputs(none).shape == (0, 3, 16, 16)
    assert inputs(none, generator(1)).shape == (0, 3, 16, 16)


def test_spec_needs_no_data(context: DataContext) -> None:
    spec = Pixels(size=48).spec("picture", context)
    assert (spec.shape, spec.vocabulary) == ((3, 48, 48), ())
    assert not list(context.cache.iterdir())
