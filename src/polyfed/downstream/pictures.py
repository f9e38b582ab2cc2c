"""Pictures with masks, and the feature maps that a frozen encoder gives of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.data.samples import Samples
from polyfed.downstream.maps import MapReader


class Pictures:
    """Pictures of one or more splits, their masks and maps; maps are kept if they take no more than ``memory``.

    Args:
        parts: samples of each split.
        modality: of the pictures.
        masks: of all, in that order [n, h, w].
        reader: of the maps.
        device: where maps and masks are wanted.
        memory: bytes of maps to hold at most; beyond that the encoder runs for every batch anew.
    """

    def __init__(
        self,
        parts: Sequence[Samples],
        modality: str,
        masks: UInt8[Tensor, "n h w"],
        reader: MapReader,
        device: torch.device,
        memory: int,
    ) -> None:
        self._parts, self._modality, self._reader, self.device = parts, modality, reader, device
        self.masks = masks
        self._held = self._fitting(memory)

    def __len__(self) -> int:
        return len(self.masks)

    def inputs(self, index: Int64[Tensor, " b"]) -> Tensor:
        """Encoder inputs of some pictures, on the device."""
        found, places, start = [], [], 0
        for samples in self._parts:
            mine = ((index >= start) & (index < start + len(samples))).nonzero().squeeze(1)
            if len(mine):
                rows = samples.rows[self._modality][index[mine] - start]
                found.append(samples.inputs[self._modality](rows))
                places.append(mine)
            start += len(samples)
        return torch.cat(found)[torch.cat(places).argsort()].to(self.device)

    def maps(self, index: Int64[Tensor, " b"]) -> list[Float[Tensor, "b c h w"]]:
        """Feature maps of some pictures, on the device.

        Raises:
            DataError: the encoder gives NaN or infinity.
        """
        if self._held is None:
            return [values.contiguous(memory_format=torch.channels_last) for values in self._computed(index)]
        held = (values[index].to(self.device) for values in self._held)
        return [values.contiguous(memory_format=torch.channels_last) for values in held]

    def truth(self, index: Int64[Tensor, " b"]) -> UInt8[Tensor, "b h w"]:
        """Masks of some pictures, on the device."""
        return self.masks[index].to(self.device)

    def _computed(self, index: Int64[Tensor, " b"]) -> list[Tensor]:
        found = [value.float() for value in self._reader(self.inputs(index))]
        if not all(bool(value.isfinite().all()) for value in found):
            raise DataError(f"feature maps of '{self._modality}' hold NaN or infinity: the model has diverged")
        return found

    def _fitting(self, memory: int, batch: int = 64) -> list[Tensor] | None:
        bytes_each = sum(4 * c * side**2 for c, side in zip(self._reader.channels, self._reader.sides, strict=True))
        if bytes_each * len(self) > memory:
            return None
        parts = [[x.cpu() for x in self._computed(index)] for index in torch.split(torch.arange(len(self)), batch)]
        return [torch.cat(values) for values in zip(*parts, strict=True)]
