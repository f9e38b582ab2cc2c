"""Decoders of segmentation: from feature maps of an encoder to logits of every pixel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.models.towers import MapNorm, normed, to_map

Maps = Sequence[Float[Tensor, "b _ _ _"]]
"""Feature maps of a batch, the coarsest first."""


class Stage(nn.Sequential):
    """3x3 convolution, norm, ReLU."""

    def __init__(self, channels: int, width: int, norm: MapNorm = "batch") -> None:
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        normed(self, norm)


class GridDecoder(nn.Module):
    """Convolutional upsampling of one map, as of a transformer's patch tokens (SETR-PUP, Zheng et al., CVPR 2021).

    Each stage convolves and then doubles the side (bilinear), but never beyond that of the masks; a 1x1 convolution
    and a last resize give the logits. Convolving before the resize costs a quarter of convolving after it.

    Args:
        channels: channels of the map.
        widths: channels of the stages (FedAID: 512, 256, 128, 64).
        size: height and width of the masks.
        outputs: logits for each pixel.
        norm: norm of the stages.

    >>> decoder = GridDecoder(channels=6, widths=(4, 4), size=16, outputs=3)
    >>> decoder([torch.zeros(2, 6, 3, 3)]).shape
    torch.Size([2, 3, 16, 16])
    """

    def __init__(
        self, channels: int, widths: Sequence[int], size: int, outputs: int = 1, norm: MapNorm = "batch"
    ) -> None:
        super().__init__()
        _require_widths(widths)
        self.size = size
        self.stages = nn.ModuleList(Stage(*pair, norm) for pair in zip([channels, *widths[:-1]], widths, strict=True))
        self.logits = nn.Conv2d(widths[-1], outputs, 1)

    def forward(self, maps: Maps) -> Float[Tensor, "b outputs size size"]:
        x = maps[0]
        for stage in self.stages:
            # not beyond the masks: the last stages would work on pixels that are thrown away
            x = _resized(stage(x), min(self.size, 2 * x.shape[-2]), min(self.size, 2 * x.shape[-1]))
        return _resized(self.logits(x), self.size, self.size)


class MaskHead(nn.Module):
    """A ``GridDecoder`` of an encoder's features by position; its norms are of groups, as DP-SGD needs it.

    Args:
        dim: width d of the features.
        classes: number of classes of pixels.
        widths: channels of the stages.
        size: height and width of the masks.
        modality: modality of the features.

    >>> head = MaskHead(dim=6, classes=3, widths=(32,), size=16, modality="image")
    >>> head(torch.zeros(2, 9, 6)).shape
    torch.Size([2, 3, 16, 16])
    """

    def __init__(self, dim: int, classes: int, widths: Sequence[int], size: int, modality: str) -> None:
        super().__init__()
        self.modality = modality
        self.decoder = GridDecoder(dim, widths, size, classes, "group")

    def forward(self, positions: Float[Tensor, "b l d"]) -> Float[Tensor, "b classes size size"]:
        """Logits from positions in a square grid."""
        logits: Tensor = self.decoder([to_map(positions)])
        return logits


class UNetDecoder(nn.Module):
    """The upward half of a U-Net (Ronneberger et al., MICCAI 2015) on the maps of a convolutional encoder.

    From the coarsest map on: resize to the next map (bilinear), concatenate, convolve. Then a 1x1 convolution and
    a resize to the masks.

    Args:
        channels: channels of each map, the coarsest first.
        widths: channels after each step; the last stands for all further ones, surplus ones are not used.
        size: height and width of the masks.

    >>> decoder = UNetDecoder(channels=(8, 6, 4), widths=(4, 4), size=16)
    >>> decoder([torch.zeros(2, 8, 2, 2), torch.zeros(2, 6, 4, 4), torch.zeros(2, 4, 8, 8)]).shape
    torch.Size([2, 1, 16, 16])
    """

    def __init__(self, channels: Sequence[int], widths: Sequence[int], size: int) -> None:
        super().__init__()
        _require_widths(widths)
        # as many steps as there are maps to join, whatever the backbone
        steps = [widths[min(k, len(widths) - 1)] for k in range(max(1, len(channels) - 1))]
        inputs = [a + b for a, b in zip([channels[0], *steps], channels[1:], strict=False)] or [channels[0]]
        self.size = size
        self.stages = nn.ModuleList(Stage(*pair) for pair in zip(inputs, steps, strict=True))
        self.logits = nn.Conv2d(steps[-1], 1, 1)

    def forward(self, maps: Maps) -> Float[Tensor, "b 1 size size"]:
        x = maps[0]
        # a transformer's single map has nothing to be joined with
        if len(maps) == 1:
            x = self.stages[0](x)
        for stage, skip in zip(self.stages, maps[1:], strict=False):
            x = stage(torch.cat([_resized(x, skip.shape[-2], skip.shape[-1]), skip], 1))
        return _resized(self.logits(x), self.size, self.size)


def _require_widths(widths: Sequence[int]) -> None:
    if not widths or min(widths) < 1:
        raise ValueError(f"widths {list(widths)} of a decoder must be one or more numbers of channels")


def _resized(x: Float[Tensor, "b c h w"], height: int, width: int) -> Float[Tensor, "b c height width"]:
    if x.shape[-2:] == (height, width):
        return x
    return F.interpolate(x, (height, width), mode="bilinear", align_corners=False)
