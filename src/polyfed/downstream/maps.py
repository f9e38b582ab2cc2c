"""Feature maps of a frozen encoder: all resolutions of a convolutional network, or the grid of patch tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import channels_last
from polyfed.models.decoders import GridDecoder, UNetDecoder
from polyfed.models.towers import LocalFeatures

_Found = dict[str, Float[Tensor, "b c h w"]]


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
        found, local = _watched(trunk, example)
        maps = _by_resolution(found, local)
        if maps:
            shapes = [value.shape for value in maps.values()]
            return cls(trunk, tuple(maps), tuple(s[1] for s in shapes), tuple(s[2] for s in shapes))
        _require_nothing_finer(trunk, found, local, what)
        side = _side(local, what)
        return cls(trunk, (), (local.local.shape[-1],), (side,))

    @torch.no_grad()
    def __call__(self, x: Tensor) -> list[Float[Tensor, "b c h w"]]:
        """Maps of a batch, the coarsest first."""
        if not self.modules:
            local: LocalFeatures = self.trunk(x)
            side = self.sides[0]
            return [local.local[:, -side * side :].transpose(1, 2).reshape(len(x), -1, side, side)]
        found, _ = _watched(self.trunk, x, self.modules)
        return [found[name] for name in self.modules]

    def decoder(self, widths: Sequence[int], size: int) -> nn.Module:
        """A new decoder for these maps: U-Net for several, upsampling for a grid; draws from the global generator."""
        made = UNetDecoder(self.channels, widths, size) if self.modules else GridDecoder(self.channels[0], widths, size)
        return channels_last(made)  # half the time of the default layout on a CPU


@torch.no_grad()
def _watched(trunk: nn.Module, x: Tensor, names: Sequence[str] | None = None) -> tuple[_Found, LocalFeatures]:
    """Outputs [b, c, h, w] of modules, in the order in which these end, and what the trunk gives."""
    found: _Found = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.dim() == 4 and output.is_floating_point():
                found.pop(name, None)
                found[name] = output

        return hook

    watched = {name: module for name, module in trunk.named_modules() if names is None or name in names}
    handles = [module.register_forward_hook(note(name)) for name, module in watched.items()]
    try:
        local: LocalFeatures = trunk(x)
    finally:
        for handle in handles:
            handle.remove()
    return found, local


def _by_resolution(found: _Found, local: LocalFeatures) -> _Found:
    """The last map that is the trunk's positions, then that of every finer resolution; none if no map is those.

    What is coarser, as what a pooling module gives of that map, is left out.
    """
    coarsest = next((name for name, value in reversed(found.items()) if _is_last_map(local, value)), None)
    if coarsest is None:
        return {}
    count = _count(found[coarsest])
    finer = {tuple(value.shape[-2:]): (name, value) for name, value in found.items() if _count(value) > count}
    ordered = sorted(finer.values(), key=lambda entry: _count(entry[1]))
    return {coarsest: found[coarsest], **dict(ordered)}


def _count(value: Float[Tensor, "b c h w"]) -> int:
    return value.shape[-2:].numel()


def _require_nothing_finer(trunk: nn.Module, found: _Found, local: LocalFeatures, what: str) -> None:
    """Refuse a convolutional trunk whose last map no module gives; a transformer's patches are as many as its tokens.

    Raises:
        ConfigError: a convolution gives more positions than the trunk.
    """
    count = local.local.shape[1]
    maps = [value for name, value in found.items() if isinstance(trunk.get_submodule(name), nn.Conv2d)]
    finer = {"x".join(map(str, value.shape[-2:])): None for value in maps if _count(value) > count}
    if finer:
        raise ConfigError(
            f"{what}: the trunk has maps of {', '.join(finer)}, but its {count} positions are the output of none of "
            "its modules, so a decoder would miss them; let a module give the last map as it is"
        )


def _is_last_map(local: LocalFeatures, last: Float[Tensor, "b c h w"]) -> bool:
    flat = last.flatten(2).transpose(1, 2)
    return flat.shape == local.local.shape and torch.equal(flat, local.local)


def _side(local: LocalFeatures, what: str) -> int:
    count = local.local.shape[1]
    side = math.isqrt(count)
    if side * side not in (count, count - 1) or (local.mask is not None and not bool(local.mask.all())):
        raise ConfigError(f"{what}: {count} positions are no square grid, so there is no map to segment; give pictures")
    return side
