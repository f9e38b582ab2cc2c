"""In-memory data registered in this process: data sets of torch and Hugging Face, tensors, DataFrames, lists."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from PIL import Image
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.data import IterableDataset

from polyfed.core.errors import DataError, nearest
from polyfed.data.arrow import IMAGE, content_key, fingerprint_of
from polyfed.data.tables import SplitTable, StoredSource

if TYPE_CHECKING:
    import datasets


_SPLITS = ("train", "validation", "test")
_SPLIT = "split"
_REGISTERED: dict[str, RegisteredData] = {}


@dataclass(frozen=True)
class RegisteredData:
    """Registered data: split -> table, or data set of ``datasets``, which may be larger than memory."""

    splits: Mapping[str, pa.Table | datasets.Dataset]

    @cached_property
    def digest(self) -> str:
        """Digest of the content, 16 hexadecimal digits."""
        return fingerprint_of(*(f"{name}:{_digest(data)}" for name, data in self.splits.items()))


def register_data(name: str, data: Any) -> None:
    """Make data of this process a source: ``{name: memory, data: NAME, columns: ...}`` in an experiment.

    Images are values of ``PIL.Image``, of ``pathlib.Path``, or arrays or tensors [h, w], [c, h, w] or [h, w, c] of one
    or three channels, of uint8 or of floats in [0, 1]; data sets of Hugging Face have them as features. Such a run can
    be resumed and evaluated only where the same data are registered under the same name; its settings hold a digest of
    the content, and other data are refused.

    Args:
        name: Name of the data in experiments; replaces data registered under it before.
        data: A ``datasets.Dataset``, a pandas frame, a pyarrow table, or a list or ``torch.utils.data.Dataset`` of rows
            (dictionaries), with a column ``split`` of train, validation or test (without it, all rows are train); or a
            mapping of splits to such data, like ``datasets.DatasetDict``. Rows may be pairs (x, y) too, and data a
            tuple of two tensors: x is then the column ``image``, ``text`` or, of numbers, ``x``; y is ``label``, or
            ``text`` if it is a text or a list of texts and x is not.

    Raises:
        DataError: the data have another type, a split is empty or has another name, or values do not fit a column.
    """
    named = dict(data) if isinstance(data, Mapping) else _by_column(_ready(data, name), name)
    for split in named:
        if split not in _SPLITS:
            raise DataError(f"data '{name}': unknown split '{split}'; {nearest(str(split), _SPLITS)}")
    splits = {split: _ready(part, name) for split, part in named.items()}
    empty = [split for split, part in splits.items() if not len(part)]
    if empty or not splits:
        raise DataError(f"data '{name}' have no rows{f' in {empty[0]}' if empty else ''}; register some")
    _REGISTERED[name] = RegisteredData(splits)


def registered_data(name: str) -> RegisteredData:
    """Data registered in this process under a name.

    Raises:
        DataError: the name is not registered.
    """
    if name not in _REGISTERED:
        remedy = f"call polyfed.register_data('{name}', ...) with the data of the run first"
        saved = "every process can read saved data (source 'arrow' or 'parquet')"
        raise DataError(
            f"no data are registered as '{name}' in this process; {remedy}; {nearest(name, _REGISTERED)}; {saved}"
        )
    return _REGISTERED[name]


def image_struct(value: Any) -> dict[str, Any] | None:
    """A PIL image, path or array of pixels as an image struct {bytes, path}; None for any other value."""
    if isinstance(value, Path):
        return {"bytes": None, "path": str(value.expanduser().absolute())}
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3):
        value = Image.fromarray(value)
    if not isinstance(value, Image.Image):
        return None
    stream = io.BytesIO()
    # PNG is lossless, and all runs decode it alike
    value.save(stream, "PNG") if value.mode != "CMYK" else value.convert("RGB").save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": None}


def _by_column(data: pa.Table | datasets.Dataset, name: str) -> dict[str, Any]:
    """Rows of each split by the column ``split``; without that column all are ``train``."""
    if _SPLIT not in data.column_names:
        return {"train": data}
    values = np.array((data.column(_SPLIT) if isinstance(data, pa.Table) else pa.array(data[_SPLIT])).to_pylist())
    rows = {str(split): np.flatnonzero(values == split) for split in dict.fromkeys(values.tolist())}
    chosen = data.take if isinstance(data, pa.Table) else data.select
    return {split: chosen(index) for split, index in rows.items()}


def _ready(data: Any, name: str) -> pa.Table | datasets.Dataset:
    library = sys.modules.get("datasets")  # imported already if data are of its types
    if isinstance(data, pa.Table) or (library is not None and isinstance(data, library.Dataset)):
        return data
    if type(data).__name__ == "DataFrame":
        return _table({str(column): data[column].tolist() for column in data.columns}, name)
    if isinstance(data, IterableDataset):
        reason = "an IterableDataset has no length, and may give other items each time"
        raise DataError(f"data '{name}': {reason}; give list(DATA), or a map-style data set")
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, (Tensor, np.ndarray)) for part in data):
        if len(data[0]) != len(data[1]):
            raise DataError(f"data '{name}': {len(data[0])} items, but {len(data[1])} labels; give one for each")
        data = [*zip(*data, strict=True)]
    if isinstance(data, str) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        wanted = (
            "a data set of torch or datasets, a pandas frame, a pyarrow table, two tensors, a list of rows or pairs"
        )
        raise DataError(f"data '{name}' are of type {type(data).__name__}; give {wanted}, or these by split")
    rows = [_row(data[number], f"data '{name}', item {number}") for number in range(len(data))]
    columns = dict.fromkeys(key for row in rows for key in row)
    return _table({column: [row.get(column) for row in rows] for column in columns}, name)


def _row(item: Any, where: str) -> dict[str, Any]:
    """An item as values by column."""
    if isinstance(item, Mapping):
        return {str(key): _value(value, f"{where}, '{key}'") for key, value in item.items()}
    if not (isinstance(item, (tuple, list)) and len(item) == 2):
        shape = f" {list(item.shape)}" if isinstance(item, (Tensor, np.ndarray)) else ""
        raise DataError(
            f"{where} is of type {type(item).__name__}{shape}; give a pair (x, y), or a dictionary of columns"
        )
    x, y = (_value(value, f"{where}, {role}") for value, role in zip(item, "xy", strict=True))
    is_text = [isinstance(one, str) or (isinstance(one, list) and isinstance((one or [0])[0], str)) for one in (x, y)]
    first = "text" if is_text[0] else "image" if image_struct(x) else "x"
    return {first: x, "text" if is_text == [False, True] else "label": y}


def _value(value: Any, where: str) -> Any:
    """A tensor or array as pixels, numbers or a number; any other value itself.

    Raises:
        DataError: it has another shape, or pixels beyond [0, 1].
    """
    is_tensor = isinstance(value, Tensor)
    if is_tensor:
        value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
    if not isinstance(value, np.ndarray) or value.ndim == 1:
        return value
    if value.ndim == 0:
        return value.item()
    shown = f"{where} is {value.dtype} {list(value.shape)}"
    order = (0, -1) if is_tensor else (-1, 0)  # channels of tensors come first by convention, those of arrays last
    axis = next((axis for axis in order if value.ndim == 3 and value.shape[axis] in (1, 3)), None)
    if value.size == 0 or (axis is None and value.ndim != 2):
        raise DataError(
            f"{shown}; give images [h, w], [c, h, w] or [h, w, c] of 1 or 3 channels, or one row of numbers"
        )
    if value.dtype != np.uint8:
        low, high = float(value.min()), float(value.max())
        if value.dtype.kind != "f" or not 0 <= low <= high <= 1:
            what = f"with values from {low:.4g} to {high:.4g}"
            raise DataError(f"{shown} {what}; give pixels of uint8, or floats in [0, 1], before they are normalised")
        value = np.rint(255 * value).astype(np.uint8)
    value = value if axis is None else np.moveaxis(value, axis, -1)
    return np.ascontiguousarray(value[..., 0] if value.shape[-1] == 1 and axis is not None else value)


def _table(columns: Mapping[str, list[Any]], name: str) -> pa.Table:
    arrays = {}
    for column, values in columns.items():
        try:
            arrays[column] = _array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"data '{name}', column '{column}': {reason}; give values of one type") from error
    return pa.table(arrays)


def _array(values: Iterable[Any]) -> pa.Array:
    known = [None if isinstance(value, float) and value != value else value for value in values]
    images = [image_struct(value) for value in known]
    if not any(images):
        return pa.array(known)
    odd = next((value for value, struct in zip(known, images, strict=True) if value is not None and not struct), None)
    if odd is not None:
        raise ValueError(f"images and a value of type {type(odd).__name__}")
    return pa.array(images, IMAGE)


def _digest(data: pa.Table | datasets.Dataset) -> str:
    if (
        not isinstance(data, pa.Table) and data.cache_files
    ):  # may be larger than memory, and has a fingerprint of its files
        return str(data._fingerprint)
    return content_key(data if isinstance(data, pa.Table) else data.with_format("arrow")[:])


class Memory(StoredSource):
    """Data of this Python process, such as a notebook's: a ``datasets.Dataset``, a pandas frame, a list of rows.

    ``polyfed.register_data(NAME, DATA)`` puts them there. A run with them can be resumed, evaluated and exported with
    its data only where the same data are registered; engines of other processes (ray, flower) do not have them.
    """

    data: str = Field(description="name that the data were registered under in this process")
    digest: str | None = Field(default=None, description="digest of the content; null: that of the registered data")
    id: str | None = Field(default=None, description="column that identifies an item; without it the row does")

    @model_validator(mode="before")
    @classmethod
    def _with_digest(cls, content: Any) -> Any:
        # written into the run folder, so that a resumed run finds out if it gets other data
        if isinstance(content, dict) and not content.get("digest") and str(content.get("data")) in _REGISTERED:
            return {**content, "digest": _REGISTERED[str(content["data"])].digest}
        return content

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        held = registered_data(self.data)
        if self.digest is not None and self.digest != held.digest:
            digests = f"(digest {held.digest}, not {self.digest}); register the same data, or start a new run"
            what = f"the data registered as '{self.data}' differ from those of the experiment"
            raise DataError(f"source '{name}': {what} {digests}")
        if split not in held.splits:
            remedy = f"register them as {{'{split}': ..., ...}} or with a column 'split', or set fractions"
            hint = nearest(split, held.splits)
            raise DataError(f"source '{name}': data '{self.data}' have no split '{split}'; {hint}; {remedy}")

        return SplitTable.of_parts(
            held.splits[split],
            held.splits.values,
            where=f"memory:{self.data}",
            split=split,
            stamp=fingerprint_of("memory", held.digest, split),
            ids=self.id,
            folder=Path("/"),  # code of this process may name any file of the machine
        )
