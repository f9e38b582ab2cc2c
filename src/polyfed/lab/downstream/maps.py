"""Feature maps of a frozen encoder: all resolutions of a convolutional network, or the grid of patch tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from polyfed.core.errors import ConfigError, DataError
from polyfed.data.backbones import channels_last
from polyfed.data.samples import Samples
from polyfed.models.decoders import GridDecoder, UNetDecoder
from polyfed.models.towers import LocalFeatures, grid_side, to_map

_Outputs = dict[str, Float[Tensor, "b c h w"]]


@dataclass(frozen=True)
class MapReader:
    """Reads maps off a trunk.

    Attributes:
        trunk: input -> ``LocalFeatures``, in evaluation mode.
        modules: names of the modules whose outputs are the maps, the coarsest first; none: the grid of positions.
        channels: of the maps.
        sides: their heights.
    """

    trunk: nn.Module
    modules: tuple[str, ...]
    channels: tuple[int, ...]
    sides: tuple[int, ...]

    @classmethod
    def of(cls, trunk: nn.Module, example: Tensor, what: str) -> MapReader:
        """How to read a trunk, found out on one batch.

        A convolutional trunk's positions are those of its last map: then every resolution gives a map, that of the
        last module which has it. Positions of anything else are a square grid of tokens, with or without a summary
        before them (frozen features of a transformer begin with one).

        Raises:
            ConfigError: the trunk's positions are no square grid, or those of no map although there are finer ones.
        """
        outputs, local = _watched(trunk, example)
        maps = _by_resolution(outputs, local)
        if maps:
            shapes = [value.shape for value in maps.values()]
            return cls(trunk, tuple(maps), tuple(s[1] for s in shapes), tuple(s[2] for s in shapes))
        return cls(trunk, (), (local.local.shape[-1],), (_grid_side(trunk, outputs, local, what),))

    @torch.no_grad()
    def __call__(self, x: Tensor) -> list[Float[Tensor, "b c h w"]]:
        """Maps of a batch, the coarsest first."""
        if not self.modules:
            local: LocalFeatures = self.trunk(x)
            return [to_map(local.local)]
        outputs, _ = _watched(self.trunk, x, self.modules)
        return [outputs[name] for name in self.modules]

    def decoder(self, widths: Sequence[int], size: int) -> nn.Module:
        """A new decoder for these maps: U-Net for several, upsampling for a grid; draws from the global generator."""
        made = UNetDecoder(self.channels, widths, size) if self.modules else GridDecoder(self.channels[0], widths, size)
        return channels_last(made)  # half the time of the default layout on a CPU


@torch.no_grad()
def _watched(trunk: nn.Module, x: Tensor, names: Sequence[str] | None = None) -> tuple[_Outputs, LocalFeatures]:
    """Outputs [b, c, h, w] of modules, in the order in which these end, and what the trunk gives."""
    outputs: _Outputs = {}

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() == 4 and output.is_floating_point():
            outputs.pop(name, None)  # of a module that runs twice, its place is that of the last time
            outputs[name] = output

    watched = {name: module for name, module in trunk.named_modules() if names is None or name in names}
    handles = [module.register_forward_hook(partial(note, name)) for name, module in watched.items()]
    try:
        local: LocalFeatures = trunk(x)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, local


def _by_resolution(outputs: _Outputs, local: LocalFeatures) -> _Outputs:
    """The last map that is the trunk's positions, then that of every finer resolution; none if no map is those.

    What is coarser, as what a pooling module gives of that map, is left out.
    """
    coarsest = next((name for name, value in reversed(outputs.items()) if _is_last_map(local, value)), None)
    if coarsest is None:
        return {}
    count = _count(outputs[coarsest])
    finer = {tuple(value.shape[-2:]): (name, value) for name, value in outputs.items() if _count(value) > count}
    ordered = sorted(finer.values(), key=lambda entry: _count(entry[1]))
    return {coarsest: outputs[coarsest], **dict(ordered)}


def _grid_side(trunk: nn.Module, outputs: _Outputs, local: LocalFeatures, what: str) -> int:
    count = local.local.shape[1]
    # a transformer's patches are as many as its tokens, so a finer convolution is a convolutional trunk's
    convolved = [value for name, value in outputs.items() if isinstance(trunk.get_submodule(name), nn.Conv2d)]
    finer = dict.fromkeys("x".join(map(str, value.shape[-2:])) for value in convolved if _count(value) > count)
    if finer:
        raise ConfigError(
            f"{what}: the trunk has maps of {', '.join(finer)}, but its {count} positions are the output of none "
            "of its modules, so a decoder would miss them; let a module give the last map as it is"
        )
    side = grid_side(local.local, local.mask)
    if side is None:
        raise ConfigError(f"{what}: {count} positions are no square grid, so there is no map to segment; give pictures")
    return side


def _count(value: Float[Tensor, "b c h w"]) -> int:
    return value.shape[-2:].numel()


def _is_last_map(local: LocalFeatures, last: Float[Tensor, "b c h w"]) -> bool:
    flat = last.flatten(2).transpose(1, 2)
    return flat.shape == local.local.shape and torch.equal(flat, local.local)


class MappedPictures:
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
        self.all = torch.arange(len(masks))
        self._held: list[Tensor] | None = None
        bytes_each = sum(4 * c * side**2 for c, side in zip(reader.channels, reader.sides, strict=True))
        # a frozen encoder gives the same maps in every epoch
        if bytes_each * len(masks) <= memory:
            computed = [[x.cpu() for x in self._computed(index)] for index in torch.split(self.all, 64)]
            self._held = [torch.cat(values) for values in zip(*computed, strict=True)]

    def __len__(self) -> int:
        return len(self.masks)

    def maps(self, index: Int64[Tensor, " b"]) -> list[Float[Tensor, "b c h w"]]:
        """Feature maps of some pictures, on the device.

        Raises:
            DataError: the encoder gives NaN or infinity.
        """
        maps = self._computed(index) if self._held is None else [held[index].to(self.device) for held in self._held]
        return [values.contiguous(memory_format=torch.channels_last) for values in maps]

    def truth(self, index: Int64[Tensor, " b"]) -> UInt8[Tensor, "b h w"]:
        return self.masks[index].to(self.device)

    def _computed(self, index: Int64[Tensor, " b"]) -> list[Tensor]:
        inputs, places, start = [], [], 0
        for samples in self._parts:
            mine = ((index >= start) & (index < start + len(samples))).nonzero().squeeze(1)
            if len(mine):
                samples.require_all(self._modality, "feature maps")
                rows = samples.rows[self._modality][index[mine] - start]
                inputs.append(samples.inputs[self._modality](rows))
                places.append(mine)
            start += len(samples)
        pictures = torch.cat(inputs)[torch.cat(places).argsort()].to(self.device)
        maps = [value.float() for value in self._reader(pictures)]
        if not all(bool(value.isfinite().all()) for value in maps):
            raise DataError(f"feature maps of '{self._modality}' hold NaN or infinity: the model has diverged")
        return maps
