"""Windows of time series."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.data.arrow import list_lengths
from polyfed.data.cells import Cells, cells_of, columns_of, require_columns
from polyfed.data.samples import Inputs
from polyfed.data.source import Column
from polyfed.data.view import DataContext, InputSpec, View


class Series(View):
    """A window of columns that hold lists of numbers (``columns: {series: [x, y, z]}``), float32 [b, length, channels].

    Values are standardised by mean and deviation of the public set, unless ``cells`` gives them; a missing one becomes
    0, the mean. Shorter series are filled up with zeros, which encoders take for padding. In training the window of a
    longer one begins anywhere, else at its beginning.
    """

    length: int = Field(default=64, ge=1, le=65536, description="steps of a window")
    cells: dict[str, Cells] = Field(
        default_factory=dict,
        description="column -> {mean, std}, of all columns in their order; empty: learnt from the public set",
    )

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        """Open series.

        Raises:
            DataError: there are other columns, or those of an item differ in length or hold no numbers.
        """
        cells, parts = self._cells(modality, context), columns_of(column, series=True)
        require_columns(column, parts, cells)
        lengths = {name: list_lengths(values) for name, values in parts.items()}
        first, *others = lengths
        for name in others:
            if (differing := np.flatnonzero(lengths[name] != lengths[first])).size:
                raise DataError(f"{column.where}, row {differing[0]}: '{first}' and '{name}' differ in length")
        return SeriesRows(
            torch.stack([self._channel(column, name, cells[name], parts[name]) for name in parts], 1),
            torch.from_numpy(lengths[first]),
            self.length,
        )

    def _channel(self, column: Column, name: str, cells: Cells, values: pa.ChunkedArray) -> Float[Tensor, " steps"]:
        try:
            return torch.from_numpy(np.nan_to_num(cells.numbers(pc.list_flatten(values)), posinf=0, neginf=0))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"{column.where}: '{name}' holds {values.type}, not lists of numbers: {error}") from error

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        """Shape (length, channels)."""
        return InputSpec((self.length, len(self._cells(modality, context))))

    def resolved(self, modality: str, context: DataContext) -> Self:
        """With its cells."""
        return self.model_copy(update={"cells": self._cells(modality, context)})

    def _cells(self, modality: str, context: DataContext) -> dict[str, Cells]:
        return cells_of(self.cells, modality, context, "series", series=True)


@dataclass(frozen=True)
class SeriesRows:
    """Opened series, one after the other.

    Attributes:
        steps: of all series.
        lengths: steps of each.
        window: steps that are shown.
    """

    steps: Float[Tensor, "steps c"]
    lengths: Int64[Tensor, " n"]
    window: int

    def __len__(self) -> int:
        return len(self.lengths)

    def __call__(self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None) -> Float[Tensor, "b l c"]:
        """Windows from the beginning, or with a generator from anywhere."""
        lengths, starts = self.lengths[rows], (self.lengths.cumsum(0) - self.lengths)[rows]
        if generator is not None:
            spare = (lengths - self.window).clamp_min(0)
            starts = starts + (torch.rand(len(rows), generator=generator) * (spare + 1)).long()
        places = starts[:, None] + torch.arange(self.window)
        there = torch.arange(self.window) < lengths[:, None]
        if not len(self.steps):
            return self.steps.new_zeros(*places.shape, self.steps.shape[1])
        return self.steps[places.clamp(max=len(self.steps) - 1)] * there[..., None]
