"""Rows of a table as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import pyarrow as pa
import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.data.cells import Cells, cells_of, columns_of, require_columns
from polyfed.data.samples import Inputs
from polyfed.data.source import Column
from polyfed.data.view import DataContext, InputSpec, View


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
        cells, parts = self._cells(modality, context), columns_of(column, series=False)
        require_columns(column, parts, cells)
        blocks = []
        for name, values in parts.items():
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
        return cells_of(self.cells, modality, context, "table", series=False)


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
