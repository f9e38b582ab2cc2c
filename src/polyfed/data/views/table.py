"""Columns of a table as numbers, standardised by the public set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float, Int64
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.core.errors import DataError, nearest
from polyfed.core.settings import Settings
from polyfed.data.arrow import fingerprint_of, is_list, is_text, unless_blank
from polyfed.data.samples import Inputs
from polyfed.data.source import Column
from polyfed.data.view import DataContext, InputSpec, View, learnt, public_column

_MOST = 100  # names of a column: more are texts or ids
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")

Values = Float[np.ndarray, "n slots"]


class Cells(Settings):
    """How the values of one column become numbers."""

    mean: float = Field(default=0.0, description="of a column of numbers, taken off")
    std: float = Field(default=1.0, gt=0, description="of a column of numbers, divided by")
    names: tuple[str, ...] = Field(default=(), description="values of a column of names, in the order of their places")

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        if self.names and (self.mean, self.std) != (0.0, 1.0):
            raise ValueError("mean and std are of numbers, names of texts; give one of them")
        return self

    @property
    def slots(self) -> int:
        """Numbers that a value becomes: whether it is known, and itself or a place for each name."""
        return 1 + (len(self.names) or 1)

    def __call__(self, values: pa.ChunkedArray) -> Values:
        """A first 1 for what is known, else zeros; a name that is none of ``names`` has no other 1.

        Raises:
            pa.ArrowInvalid: values of a column of numbers are none.
        """
        if self.names:
            texts = unless_blank(values.cast(pa.string()))
            slots = pc.fill_null(pc.index_in(texts, pa.array(self.names)), -1).to_numpy()
            known = ~texts.is_null().to_numpy()
            return np.column_stack([known, slots[:, None] == np.arange(len(self.names))]).astype(np.float32)
        numbers = ((_plain(values) - self.mean) / self.std).astype(np.float32)
        return np.column_stack([np.isfinite(numbers), np.nan_to_num(numbers, posinf=0, neginf=0)]).astype(np.float32)


def learnt_cells(values: pa.ChunkedArray, where: str) -> Cells:
    """Mean and standard deviation of numbers; else the names that occur.

    Raises:
        DataError: values are neither, or too many names.
    """
    if is_text(values.type):
        names = sorted(unless_blank(values).unique().drop_null().to_pylist())
        decimals = any("." in name for name in names) and all(map(_NUMBER.fullmatch, names))
        if not decimals:  # a table of texts keeps 2.50, which as a label is no 2.5
            if not 0 < len(names) <= _MOST:
                what = f"{len(names)} different texts are no names of 1 to {_MOST}"
                raise DataError(f"{where}: {what}; leave the column out")
            return Cells(names=tuple(names))
        values = values.cast(pa.float64())
    dtype = values.type
    if not (pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype)):
        raise DataError(f"{where}: holds {dtype}; a table has numbers, true and false, or names")
    numbers = _plain(values)
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size:
        return Cells()
    # a constant says nothing; its deviation is rounding, or 0
    constant = numbers.min() == numbers.max()
    return Cells(mean=float(numbers.mean()), std=1.0 if constant else float(numbers.std()))


def _plain(values: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """NaN where a value is not known; in float64, as seconds since 1970 have no place in float32."""
    numbers: npt.NDArray[np.float64] = pc.fill_null(values.cast(pa.float64()), np.nan).to_numpy()
    return numbers


def cells_of(given: Mapping[str, Cells], modality: str, context: DataContext) -> dict[str, Cells]:
    """Column -> its cells: given, or learnt from the public set, which all participants may see.

    Args:
        given: by the settings of the view; empty: all are learnt.
        modality: whose columns.
        context: has the public set, and keeps what was learnt.

    Raises:
        ConfigError: nothing is given, and there is no public set with the modality.
        DataError: the public columns are not of the type.
    """
    if given:
        return dict(given)
    column = public_column(context, modality, "view 'table'", "set its cells")
    key = f"cells-table-{fingerprint_of(modality, column.fingerprint)}"
    if key not in context.fitted:

        def learn() -> dict[str, object]:
            parts = _parts_of(column).items()
            return {name: learnt_cells(values, f"{column.where}: '{name}'").model_dump() for name, values in parts}

        context.fitted[key] = learnt(
            context, key, learn, lambda read: {name: Cells.model_validate(cells) for name, cells in read.items()}
        )
    cells = context.fitted[key]
    assert isinstance(cells, dict)
    return cells


def _parts_of(column: Column, wanted: Mapping[str, object] | None = None) -> dict[str, pa.ChunkedArray]:
    """The columns that are one value together, by name; those that are ``wanted``, in that order, unless it is None.

    Raises:
        DataError: it is a single column, there are others, or one holds lists.
    """
    values = column.flat_values()
    if not pa.types.is_struct(values.type):
        example = "columns: {table: [NAME, NAME]}"
        raise DataError(f"{column.where}: is one column; name it, and others, in brackets: {example}")
    parts = {}
    for field in values.type:
        part = pc.struct_field(values, field.name)
        # values in place of numbers of them, as categories of pandas are stored
        parts[field.name] = part.cast(part.type.value_type) if pa.types.is_dictionary(part.type) else part
        if is_list(part.type):
            raise DataError(f"{column.where}: '{field.name}' holds {part.type}; a table has one value an item")
    if wanted is not None and [*parts] != [*wanted]:
        odd = next((name for name in [*parts, *wanted] if (name in parts) != (name in wanted)), next(iter(parts)))
        known = f"the view knows the columns {', '.join(wanted)}, in this order"
        raise DataError(f"{column.where}: {known}; '{odd}' does not fit, {nearest(odd, wanted)}")
    return parts


class Table(View):
    """Several columns of numbers or names (``columns: {table: [age, sex]}``), float32.

    A column becomes a 1 if its value is known, then the standardised number, or a 1 at the place of the name; zeros
    stand for a missing value, so for the mean. Mean, deviation and names are of the public set, never of private or
    test data, unless ``cells`` gives them.
    """

    cells: dict[str, Cells] = Field(
        default_factory=dict,
        description="column -> {mean, std} or {names}, of all in their order; empty: learnt from the public set",
    )
    layout: Literal["vector", "positions"] = Field(
        default="vector",
        description="one vector [f]; or for transformers a position [f] for each column, all zero where it is missing",
    )

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        """Open rows of a table.

        Raises:
            DataError: it has other columns, or values of another kind.
        """
        cells, blocks = self._cells(modality, context), []
        for name, values in _parts_of(column, cells).items():
            try:
                blocks.append(torch.from_numpy(cells[name](values)))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise DataError(f"{column.where}: '{name}' holds {values.type}, not numbers: {error}") from error
        return TableRows(torch.cat(blocks, 1), tuple(len(block[0]) for block in blocks), self.layout == "positions")

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        """Shape (f,), or (columns, f)."""
        cells = self._cells(modality, context)
        width = sum(one.slots for one in cells.values())
        return InputSpec((width,) if self.layout == "vector" else (len(cells), width))

    def resolved(self, modality: str, context: DataContext) -> Self:
        """With its cells."""
        return self.model_copy(update={"cells": self._cells(modality, context)})

    def _cells(self, modality: str, context: DataContext) -> dict[str, Cells]:
        return cells_of(self.cells, modality, context)


@dataclass(frozen=True)
class TableRows:
    """Opened rows of a table.

    Attributes:
        values: all rows.
        slots: numbers of each column.
        apart: whether each column is a position, with zeros at the places of the others.
    """

    values: Float[Tensor, "n f"]
    slots: tuple[int, ...]
    apart: bool = False

    def __len__(self) -> int:
        return len(self.values)

    def __call__(self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None) -> Float[Tensor, "b ... f"]:
        """Rows [b, f] or [b, columns, f]; the same with and without a generator."""
        chosen = self.values[rows]
        if not self.apart:
            return chosen
        owners = torch.repeat_interleave(torch.arange(len(self.slots)), torch.tensor(self.slots))
        return chosen[:, None] * (owners == torch.arange(len(self.slots))[:, None])
