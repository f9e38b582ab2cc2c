"""A table of six items with gaps, and its sources."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor

from polyfed.data.source import Column, Split
from polyfed.data.sources.stored import Parquet
from polyfed.data.tables import SplitTable, split_of_table
from polyfed.data.view import DataContext

FEATURES = {"group": {"names": ["Head", "Thorax"], "_type": "ClassLabel"}}


class Table:
    """Inputs out of values, with one random number added in the training view."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __call__(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.values[rows] + (0.0 if generator is None else torch.rand((), generator=generator))


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """An image as a file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def noise(seed: int, height: int = 12, width: int = 20) -> Image.Image:
    """An image without any pattern."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def struct_of(image: Image.Image, path: str = "a.png") -> dict[str, Any]:
    """An image as a row holds it."""
    return {"bytes": encoded(image), "path": path}


def picture(shade: int) -> dict[str, Any]:
    return struct_of(Image.fromarray(np.full((8, 8, 3), shade, np.uint8)), f"{shade}.png")


def column_of(values: Sequence[Any], fingerprint: str = "f", **options: Any) -> Column:
    """A column of values that no file holds."""
    return Column(pa.chunked_array([values]), fingerprint, "pets/train, column 'x'", **options)


def unread(fingerprint: str = "f", **options: Any) -> Column:
    """A column that must not be read."""
    return Column(lambda: pytest.fail("the column was read"), fingerprint, "here", **options)


def table(**changed: Any) -> pa.Table:
    columns = {
        "key": [f"k{n}" for n in range(6)],
        "image": [picture(40 * n) for n in range(6)],
        "text": [f"report {n}" for n in range(6)],
        "captions": [[f"one {n}", f"two {n}"] for n in range(6)],
        "ok": [True, False, True, True, False, True],
        "country": ["Italy", "Spain", "Italy", None, "Germany", "Italy"],
        "age": [1.5] * 6,
        "group": [0, 1, 1, 0, 1, 0],
        "mention": pa.array([0, 1, 0, 1, 1, 0], pa.int8()),
        "note": ["a", "b", "a", None, " ", None],
        "finding": ["pneumonia", "covid", "pneumonia", "covid", "pneumonia", "covid"],
    } | changed
    metadata = {b"huggingface": json.dumps({"info": {"features": FEATURES}}).encode()}
    return pa.table(columns).replace_schema_metadata(metadata)


def written(folder: Path, split: str = "train", write_statistics: bool = True, **changed: Any) -> Path:
    (folder / "set").mkdir(exist_ok=True)
    file = folder / "set" / f"{split}.parquet"
    pq.write_table(table(**changed), file, row_group_size=4, write_statistics=write_statistics)
    return folder


def opened(folder: Path, split: str = "train", **settings: Any) -> Split:
    given = {"path": "set", "id": "key", "columns": {"image": "image", "text": "text"}} | settings
    return Parquet.model_validate(given).open(split, name="s", data_dir=folder)


def in_memory(data: pa.Table, ids: str | None = None, **settings: Any) -> Split:
    """A split of a table that no file holds."""
    split_table = SplitTable(data.column, lambda: data.num_rows, data.schema, "memory", "train", lambda name: "f", ids)
    return split_of_table(split_table, Parquet.model_validate({"path": "unused"} | settings), "s")


def context_of(folder: Path) -> DataContext:
    return DataContext(folder / "cache")
