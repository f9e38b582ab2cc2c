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

_MOST = 100  # most names of a column: more are texts or ids
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")

Values = Float[np.ndarray, "n slots"]


class Cells(Settings):
    """Conversion of one column to numbers."""

    mean: float = Field(default=0.0, description="mean of a column of numbers, which is subtracted")
    std: float = Field(default=1.0, gt=0, description="divisor of a column of numbers")
    names: tuple[str, ...] = Field(default=(), description="values of a column of names, in the order of their slots")

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        if self.names and (self.mean, self.std) != (0.0, 1.0):
            raise ValueError("mean and std are for numbers, names for texts; give one of them")
        return self

    @property
    def slots(self) -> int:
        """Numbers per value: 1 if it is known, and the number itself or a slot per name."""
        return 1 + (len(self.names) or 1)

    def __call__(self, values: pa.ChunkedArray) -> Values:
        """A first 1 for known values, else zeros; an unlisted name has no other 1.

        Raises:
            pa.ArrowInvalid: values of a column of numbers are not numbers.
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
        DataError: values are neither numbers nor names, or there are too many names.
    """
    if is_text(values.type):
        names = sorted(unless_blank(values).unique().drop_null().to_pylist())
        decimals = any("." in name for name in names) and all(map(_NUMBER.fullmatch, names))
        if not decimals:  # a table of texts keeps 2.50, which differs from 2.5 as a label
            if not 0 < len(names) <= _MOST:
                raise DataError(
                    f"{where}: {len(names)} distinct texts, and 1 to {_MOST} can be names; leave the column out"
                )
            return Cells(names=tuple(names))
        values = values.cast(pa.float64())
    dtype = values.type
    if not (pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype)):
        raise DataError(f"{where}: holds {dtype}; a table has numbers, true and false, or names")
    numbers = _plain(values)
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size:
        return Cells()
    # the deviation of a constant is rounding, or 0
    constant = numbers.min() == numbers.max()
    return Cells(mean=float(numbers.mean()), std=1.0 if constant else float(numbers.std()))


def _plain(values: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """Values with NaN where unknown; in float64, as float32 cannot hold seconds since 1970."""
    numbers: npt.NDArray[np.float64] = pc.fill_null(values.cast(pa.float64()), np.nan).to_numpy()
    return numbers


def cells_of(given: Mapping[str, Cells], modality: str, context: DataContext) -> dict[str, Cells]:
    """Column -> its cells: given, or learnt from the public set, which all participants may see.

    Args:
        given: Cells from the view's settings; empty: all are learnt.
        modality: Modality of the columns.
        context: Context with the public set and the memo of learnt cells.

    Raises:
        ConfigError: cells are not given, and the public set lacks the modality.
        DataError: public columns have other types.
    """
    if given:
        return dict(given)
    column = public_column(context, modality, "view 'table'", "set its cells")
    key = f"cells-table-{fingerprint_of(modality, column.fingerprint)}"

    def learn() -> dict[str, object]:
        parts = _parts_of(column).items()
        return {name: learnt_cells(values, f"{column.where}: '{name}'").model_dump() for name, values in parts}

    def read(content: Mapping[str, object]) -> dict[str, Cells]:
        return {name: Cells.model_validate(cells) for name, cells in content.items()}

    return context.memo(key, lambda: learnt(context, key, learn, read))


def _parts_of(column: Column, wanted: Mapping[str, object] | None = None) -> dict[str, pa.ChunkedArray]:
    """Name -> column, for columns that are one value together; exactly those ``wanted``, in order, unless it is None.

    Raises:
        DataError: the data have a single column or other columns, or a column holds lists.
    """
    values = column.flat_values()
    if not pa.types.is_struct(values.type):
        raise DataError(f"{column.where}: one column; name several in brackets: columns: {{table: [NAME, NAME]}}")
    parts = {}
    for field in values.type:
        part = pc.struct_field(values, field.name)
        # values in place of the indices of pandas' categories
        parts[field.name] = part.cast(part.type.value_type) if pa.types.is_dictionary(part.type) else part
        if is_list(part.type):
            raise DataError(f"{column.where}: '{field.name}' holds {part.type}; a table has one value per item")
    if wanted is not None and [*parts] != [*wanted]:
        odd = next((name for name in [*parts, *wanted] if (name in parts) != (name in wanted)), next(iter(parts)))
        known = f"the view has cells for the columns {', '.join(wanted)}, in this order"
        raise DataError(f"{column.where}: {known}; '{odd}' does not fit, {nearest(odd, wanted)}")
    return parts


class Table(View):
    """Several columns of numbers or names (``columns: {table: [age, sex]}``), float32.

    A column becomes a 1 if its value is known, then the standardised number, or a 1 in the slot of the name; missing
    values are zeros, so the mean. Mean, deviation and names come from the public set, never from private or test data,
    unless ``cells`` gives them.
    """

    cells: dict[str, Cells] = Field(
        default_factory=dict,
        description="column -> {mean, std} or {names}, for all columns in order; empty: learnt from the public set",
    )
    layout: Literal["vector", "positions"] = Field(
        default="vector",
        description="one vector [f]; or for transformers one position [f] per column, all zero where it is missing",
    )

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        """Open rows of a table.

        Raises:
            DataError: the columns, or types of their values, differ from the cells.
        """
        cells, blocks = cells_of(self.cells, modality, context), []
        for name, values in _parts_of(column, cells).items():
            try:
                blocks.append(torch.from_numpy(cells[name](values)))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise DataError(f"{column.where}: '{name}' holds {values.type}, not numbers: {error}") from error
        return TableRows(torch.cat(blocks, 1), tuple(len(block[0]) for block in blocks), self.layout == "positions")

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        """Shape (f,), or (columns, f)."""
        cells = cells_of(self.cells, modality, context)
        width = sum(one.slots for one in cells.values())
        return InputSpec((width,) if self.layout == "vector" else (len(cells), width))

    def resolved(self, modality: str, context: DataContext) -> Self:
        """The view with its cells filled in."""
        return self.model_copy(update={"cells": cells_of(self.cells, modality, context)})


@dataclass(frozen=True)
class TableRows:
    """Opened rows of a table.

    Attributes:
        values: all rows.
        slots: Width of each column.
        apart: True if each column is a position, with zeros in the slots of the others.
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
