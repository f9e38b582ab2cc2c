"""Replies that wait for each other: what is known of each, and where it is kept meanwhile."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import safetensors.torch
import torch
from torch import Tensor

from polyfed.federation.client import ClientInfo
from polyfed.federation.median_norms import Shapes
from polyfed.federation.update_norms import Norms
from polyfed.wire.framing import tensor_bytes
from polyfed.wire.payload import Payload, TensorBundle, settled


@dataclass(frozen=True)
class Arrival:
    """A reply that has arrived, and what its update was judged to be.

    Attributes:
        client: who sent it.
        payload: what it sent.
        moved: field of weights -> norms of its update.
        shapes: field of weights -> shapes of its floating tensors.
        refused: why it does not pass, or None.
        shortened: why it was scaled down, or None.
    """

    client: ClientInfo
    payload: Payload
    moved: Mapping[str, Norms]
    shapes: Mapping[str, Shapes] = field(default_factory=dict)
    refused: str | None = None
    shortened: str | None = None


@dataclass
class WaitingRoom:
    """Replies in order: in memory up to a number of bytes, the others in files without a name.

    Attributes:
        limit: bytes of tensors in memory.
        folder: where the files are; None: where temporary files are.
    """

    limit: int
    folder: Path | None = None
    _held: list[Arrival | _Filed] = field(default_factory=list)
    _bytes: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._held

    def add(self, arrival: Arrival) -> None:
        """Let a reply wait."""
        size = sum(tensor_bytes(item) for item in arrival.payload.bundles.values())
        if self._bytes + size <= self.limit:
            self._bytes += size
            self._held.append(arrival)
        else:
            self._held.append(_Filed.of(arrival, self.folder))

    def leaving(self) -> Iterator[Arrival]:
        """All replies in order; each is let go of when the next is asked for."""
        self._held.reverse()
        while self._held:
            item = self._held.pop()
            yield item.read() if isinstance(item, _Filed) else item


@dataclass(frozen=True)
class _Filed:
    """A reply whose tensors are in a file, which is gone when it is closed, even by a kill."""

    arrival: Arrival
    file: IO[bytes]
    devices: Mapping[str, torch.device]

    @classmethod
    def of(cls, arrival: Arrival, folder: Path | None) -> _Filed:
        bundles = arrival.payload.bundles
        tensors = {f"{name}/{key}": value for name, item in bundles.items() for key, value in item.items()}
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by ``read``
        file.write(safetensors.torch.save({key: value.cpu().contiguous().clone() for key, value in tensors.items()}))
        empty = {name: _with_tensors(item, {}) for name, item in bundles.items()}
        outline = replace(arrival, payload=Payload({**arrival.payload.fields, **empty}))
        return cls(outline, file, {key: value.device for key, value in tensors.items()})

    def read(self) -> Arrival:
        with self.file:
            self.file.seek(0)
            loaded = safetensors.torch.load(self.file.read())
        tensors: dict[str, dict[str, Tensor]] = {name: {} for name in self.arrival.payload.bundles}
        for path, device in self.devices.items():
            name, _, key = path.partition("/")
            tensors[name][key] = settled(loaded[path].to(device))
        full = {name: _with_tensors(item, tensors[name]) for name, item in self.arrival.payload.bundles.items()}
        return replace(self.arrival, payload=Payload({**self.arrival.payload.fields, **full}))


def _with_tensors(item: TensorBundle, tensors: Mapping[str, Tensor]) -> TensorBundle:
    return type(item)(tensors=tensors, **item.attributes())
