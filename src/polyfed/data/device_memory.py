"""Batches on a device: tables that stay there, and copies of further data, one per batch and one batch ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor


class TableInputs(ABC):
    """Opened inputs whose stored rows become encoder input by operations that any device can do.

    Draws are made on the CPU, so that they are the same on all devices.
    """

    @property
    @abstractmethod
    def table(self) -> Any:
        """All stored rows as an array, or what is indexed like one."""

    def gathered(self, rows: Int64[Tensor, " b"]) -> Tensor:
        """Stored rows, on the CPU."""
        return torch.from_numpy(self.table[rows.numpy()])

    def draws(self, shape: Sequence[int], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Random numbers of the training view of stored rows of a shape, [b, ...]."""
        return ()

    @abstractmethod
    def computed(self, x: Tensor, *draws: Tensor) -> Tensor:
        """Encoder input of stored rows, on their device; the evaluation view without draws."""

    def __call__(self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None) -> Tensor:
        """Encoder input of ``rows``, as ``Inputs``."""
        x = self.gathered(rows)
        return self.computed(x) if generator is None else self.computed(x, *self.draws(x.shape, generator))


class Pending(NamedTuple):
    """A column of a batch that a device computes from tensors which the CPU has gathered or drawn."""

    parts: tuple[Tensor, ...]
    compute: Callable[..., Tensor] = lambda x: x


Column = Tensor | Pending
"""A column of a batch, or what a device computes it from."""


def each(columns: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Columns, some of them in mappings, with a change applied to every column."""
    # by the types of columns: to ask for a mapping takes longer
    return {name: change(own) if isinstance(own, Column) else each(own, change) for name, own in columns.items()}


@dataclass(eq=False)
class DeviceMemory:
    """Data on a device other than the CPU.

    Attributes:
        device: Device of the batches.
        most: Bytes of tables that stay there; further ones cross row by row. They are freed with this object.
    """

    device: torch.device
    most: int = 0
    _tables: dict[object, tuple[npt.NDArray[Any], Tensor | None]] = field(default_factory=dict)

    def column(self, inputs: Any, rows: Int64[Tensor, " b"], generator: torch.Generator | None) -> Pending:
        """Encoder input of ``rows``, to be computed on the device."""
        if not isinstance(inputs, TableInputs):
            return Pending((inputs(rows, generator),))
        table = self._resident(inputs.table)
        x = inputs.gathered(rows) if table is None else table
        draws = () if generator is None else inputs.draws((len(rows), *x.shape[1:]), generator)
        if table is None:
            return Pending((x, *draws), inputs.computed)
        return Pending((rows, *draws), lambda rows, *draws: inputs.computed(table.index_select(0, rows), *draws))

    def _resident(self, table: object) -> Tensor | None:
        """A table on the device, copied at its first use; None if it does not fit with those before it."""
        if not isinstance(table, np.ndarray):
            return None
        # views that differ in augmentation alone read one file
        key = getattr(table.base, "filename", id(table)), table.shape
        if key not in self._tables:
            used = sum(known.nbytes for known, there in self._tables.values() if there is not None)
            fits = used + table.nbytes <= self.most
            self._tables[key] = table, torch.tensor(table).to(self.device) if fits else None
        return self._tables[key][1]

    def ahead(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Columns of batches on the device; while one is used, the next is on its way."""
        sent = map(self.send, batches)
        current = next(sent, None)
        while current is not None:
            following = next(sent, None)
            yield current()
            current = following

    def send(self, columns: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """Begin to copy all parts of columns at once; the function returned gives the columns on the device."""
        leaves: list[Pending] = []
        columns = each(columns, lambda column: column if isinstance(column, Pending) else Pending((column,)))
        each(columns, leaves.append)
        parts = {id(part): part for leaf in leaves for part in leaf.parts}
        # of the widest items first: each begins at a multiple of its items' size
        ordered = sorted(parts.values(), key=lambda part: -part.itemsize)
        flat = [part.reshape(-1).view(torch.uint8) for part in ordered]
        copied = self._copied(flat)

        def arrived() -> dict[str, Any]:
            pieces = zip(ordered, torch.split(copied(), [len(part) for part in flat]), strict=True)
            there = {id(part): piece.view(part.dtype).view(part.shape) for part, piece in pieces}
            return each(columns, lambda leaf: leaf.compute(*(there[id(part)] for part in leaf.parts)))

        return arrived

    def _copied(self, flat: list[UInt8[Tensor, " bytes"]]) -> Callable[[], UInt8[Tensor, " bytes"]]:
        """One copy of all bytes; on CUDA from pinned memory, during queued computations."""
        if self.device.type != "cuda":
            there = torch.cat(flat).to(self.device)
            return lambda: there
        pinned = torch.empty(sum(map(len, flat)), dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._stream):
            there = torch.cat(flat, out=pinned).to(self.device, non_blocking=True)
            done = self._stream.record_event()

        def arrived() -> Tensor:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(done)  # the device waits, not the CPU
            there.record_stream(current)
            return there

        return arrived

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]


def memory_of(device: torch.device, most: int) -> DeviceMemory | None:
    """Memory of a device for ``most`` bytes of tables; None for the CPU, which uses data where they are."""
    return None if device.type == "cpu" else DeviceMemory(device, most)
