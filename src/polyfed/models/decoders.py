"""Decoders of segmentation: from the feature map of an encoder to logits of every pixel."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.models.convolutional import MapNorm, normed
from polyfed.models.towers import to_map


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
        channels: of the map.
        widths: channels of the stages (FedAID: 512, 256, 128, 64).
        size: height and width of the masks.
        outputs: logits a pixel.
        norm: of the stages.

    >>> decoder = GridDecoder(channels=6, widths=(4, 4), size=16, outputs=3)
    >>> decoder(torch.zeros(2, 6, 3, 3)).shape
    torch.Size([2, 3, 16, 16])
    """

    def __init__(
        self, channels: int, widths: Sequence[int], size: int, outputs: int = 1, norm: MapNorm = "batch"
    ) -> None:
        super().__init__()
        _require_widths(widths)
        self.size = size
        pairs = zip([channels, *widths[:-1]], widths, strict=True)
        self.stages = nn.ModuleList(Stage(*pair, norm) for pair in pairs)
        self.logits = nn.Conv2d(widths[-1], outputs, 1)

    def forward(self, x: Float[Tensor, "b channels h w"]) -> Float[Tensor, "b outputs size size"]:
        for stage in self.stages:
            # not beyond the masks: the last stages would work on pixels that are thrown away
            x = _resized(stage(x), min(self.size, 2 * x.shape[-2]), min(self.size, 2 * x.shape[-1]))
        return _resized(self.logits(x), self.size, self.size)


class MaskHead(nn.Module):
    """A ``GridDecoder`` of an encoder's features by position; its norms are of groups, as DP-SGD needs it.

    Args:
        dim: width d of the features.
        classes: of pixels.
        widths: channels of the stages.
        size: height and width of the masks.
        modality: whose features it reads.

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
        logits: Tensor = self.decoder(to_map(positions))
        return logits


def _require_widths(widths: Sequence[int]) -> None:
    if not widths or min(widths) < 1:
        raise ValueError(f"widths {list(widths)} of a decoder must be one or more numbers of channels")


def _resized(x: Float[Tensor, "b c h w"], height: int, width: int) -> Float[Tensor, "b c height width"]:
    if x.shape[-2:] == (height, width):
        return x
    return F.interpolate(x, (height, width), mode="bilinear", align_corners=False)
