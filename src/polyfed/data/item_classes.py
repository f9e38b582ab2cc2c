"""Classes of items: those of a target, or the values of one or several columns taken together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.core.errors import ConfigError, DataError
from polyfed.data.arrow import is_list
from polyfed.data.assembly import item_labels, item_target
from polyfed.data.selection import lacking
from polyfed.data.source import Column, Split
from polyfed.data.units import Indices

MISSING = "missing"
"""Name of a null value, which is a value of its own."""


@dataclass(frozen=True)
class ItemClasses:
    """Class of every item of a split, and the columns that the class is made of.

    Attributes:
        numbers: class number of each item. Splits that are looked at together have equal numbers for equal classes.
        names: class number -> name, where the data have one.
        columns: column -> number of the value of each item; empty where the class is a target's.
        values: column -> names of its values, by their number.
    """

    numbers: Int64[Tensor, " n"]
    names: Mapping[int, str]
    columns: Mapping[str, Indices] = field(default_factory=dict)
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def counts(self, items: Int64[Tensor, " k"]) -> dict[str, int]:
        """Class name -> how many of ``items`` are of it, in the order of the class numbers; none with 0."""
        found, counts = torch.unique(self.numbers[items], return_counts=True)
        pairs = zip(found.tolist(), counts.tolist(), strict=True)
        return {self.names.get(number, str(number)): count for number, count in pairs}

    def column_counts(self, items: Int64[Tensor, " k"]) -> dict[str, dict[str, int]]:
        """Column -> name of a value -> how many of ``items`` have it, zeros included."""
        return {
            name: dict(
                zip(
                    self.values[name],
                    np.bincount(codes[items.numpy()], minlength=len(self.values[name])).tolist(),
                    strict=True,
                )
            )
            for name, codes in self.columns.items()
        }


def item_classes(splits: Sequence[Split], of: Sequence[str], key: str) -> list[ItemClasses] | None:
    """Classes of the items of each split, with equal numbers for equal classes; None if they have none.

    Without columns it is the first target with one value an item. Columns that hold only 0 and 1 (or truth values)
    make the class sum_i bit_i 2^i, called after the columns that are 1. Otherwise it is the tuple of the columns'
    values, numbered in sorted order, first column first. Numbers do not depend on which columns are targets.

    Args:
        splits: splits of one source.
        of: columns.
        key: setting that names them, for messages.

    Raises:
        ConfigError: there is no such column, or it holds neither whole numbers nor truth values nor texts.
    """
    if not of:
        return _of_target(splits)
    columns = {name: _joint(splits, name, f"{key}: '{name}'") for name in of}
    numbers, names = _classes(list(columns.values()))
    values = {name: column.names for name, column in columns.items()}
    ends = np.cumsum([len(split) for split in splits])[:-1]
    codes = {name: np.split(column.codes, ends) for name, column in columns.items()}
    return [
        ItemClasses(torch.from_numpy(own), names, {name: codes[name][k] for name in of}, values)
        for k, own in enumerate(np.split(numbers, ends))
    ]


def item_groups(split: Split, column: str, key: str) -> Int64[Tensor, " n"]:
    """A number for each item, equal for equal values of a column; an item with a null or blank one is like no other.

    Raises:
        ConfigError: as ``item_classes``.
    """
    joint = _joint([split], column, f"{key}: '{column}'")
    texts = pa.array([None if value is None else str(value) for value in joint.values], pa.string())
    alone = lacking(pa.chunked_array([texts]))[joint.codes]
    return torch.from_numpy(np.where(alone, len(joint.values) + np.cumsum(alone) - 1, joint.codes))


@dataclass(frozen=True)
class _Joint:
    """A column of several splits one after the other: the sorted distinct values, and the number of each item's.

    Attributes:
        name: of the column.
        values: null first; of a target of texts the numbers of its classes.
        codes: place among ``values`` of each item's value.
        classes: names of the values 0, 1, ... of a target.
        encoded: see Column.
    """

    name: str
    values: Sequence[Any]
    codes: Indices
    classes: Sequence[str]
    encoded: bool

    @property
    def is_bit(self) -> bool:
        return not self.encoded and all(value is not None and value in (0, 1) for value in self.values)

    def codes_of_bits(self) -> Indices:
        return np.array([int(value) for value in self.values], dtype=np.int64)[self.codes]

    @property
    def names(self) -> list[str]:
        return [self._named(value) for value in self.values]

    def _named(self, value: Any) -> str:
        if value is None or isinstance(value, str):
            return MISSING if value is None else value
        return self.classes[value] if 0 <= value < len(self.classes) else str(int(value))

    def label(self, code: int) -> str:
        """How a class with this value is called: a bare number says of which column it is."""
        name = self.names[code]
        return name if isinstance(self.values[code], str) or self.classes else f"{self.name} {name}"


def _of_target(splits: Sequence[Split]) -> list[ItemClasses] | None:
    classes = []
    for split in splits:
        labels = item_labels(split)
        if labels is None:
            return None
        classes.append(ItemClasses(labels, dict(enumerate(split.classes.get(item_target(split) or "", ())))))
    return classes


def _joint(splits: Sequence[Split], name: str, where: str) -> _Joint:
    columns = [_read(split, name, where) for split in splits]
    flat = [_flat(column, where) for column in columns]
    values = _distinct(flat)
    codes = [pc.index_in(column, value_set=pa.array(values, column.type)).to_numpy() for column in flat]
    encoded = any(column.encoded for column in columns)
    return _Joint(name, values, np.concatenate(codes).astype(np.int64), _class_names(splits, name), encoded)


def _distinct(columns: Sequence[pa.ChunkedArray]) -> list[Any]:
    """Values that occur, ascending, null first."""
    values = {value for column in columns for value in column.unique().to_pylist()}
    return sorted(values, key=lambda value: (value is not None, 0 if value is None else value))


def _class_names(splits: Sequence[Split], column: str) -> Sequence[str]:
    """Names of the classes of a target that is read from the column; none if there is no such target."""
    for split in splits:
        targets = [target for target, read_from in split.targets.items() if read_from == column]
        for target in targets:
            if target in split.classes:
                return split.classes[target]
    return ()


def _read(split: Split, name: str, where: str) -> Column:
    try:
        return split.read(name)
    except DataError as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error


def _flat(column: Column, where: str) -> pa.ChunkedArray:
    """The values of a column whose type can make classes."""
    kind = column.values.type
    values = column.values.cast(kind.value_type) if pa.types.is_dictionary(kind) else column.values
    if is_list(kind) or not any(test(values.type) for test in _USABLE):
        raise ConfigError(
            f"{where} holds {kind} ({column.where}); needed is one whole number, truth value or text an item"
        )
    return values


_USABLE = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string)


def _classes(columns: Sequence[_Joint]) -> tuple[Indices, dict[int, str]]:
    """Class of each item, and name of each class that occurs."""
    return _bit_sums(columns) if all(column.is_bit for column in columns) else _tuples(columns)


def _bit_sums(columns: Sequence[_Joint]) -> tuple[Indices, dict[int, str]]:
    """Sums of the columns' bits, called after the columns that are 1."""
    numbers = np.zeros(len(columns[0].codes), dtype=np.int64)
    for bit, column in enumerate(columns):
        numbers += column.codes_of_bits() << bit
    return numbers, {int(number): _ones(int(number), columns) for number in np.unique(numbers)}


def _ones(number: int, columns: Sequence[_Joint]) -> str:
    return "+".join(column.name for bit, column in enumerate(columns) if number >> bit & 1) or "none"


def _tuples(columns: Sequence[_Joint]) -> tuple[Indices, dict[int, str]]:
    """Numbers of the tuples of values that occur, in sorted order, and their names."""
    numbers = np.zeros(len(columns[0].codes), dtype=np.int64)
    for column in columns:  # renumbered each time: the product of many columns' counts need not fit 64 bits
        _, numbers = np.unique(numbers * len(column.values) + column.codes, return_inverse=True)
    _, first = np.unique(numbers, return_index=True)
    names = [" / ".join(column.label(int(column.codes[item])) for column in columns) for item in first]
    return numbers, dict(enumerate(names))
