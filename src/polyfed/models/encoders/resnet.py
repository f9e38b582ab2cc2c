"""ResNet image encoder (He et al., CVPR 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

from jaxtyping import Float
from pydantic import Field, SerializeAsAny, model_validator
from torch import Tensor, nn

from polyfed.data.backbones import channels_last
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels
from polyfed.models.encoder import Encoder, image_shape
from polyfed.models.towers import EncoderTower, LocalFeatures, MapNorm, from_map, laid_out, normed

_BlockType = Literal["basic", "bottleneck"]


class _Preset(NamedTuple):
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    block: _BlockType


_WIDE = (256, 512, 1024, 2048)
_PRESETS = {
    "tiny": _Preset((24, 48, 96, 192), (1, 1, 1, 1), "basic"),
    "small": _Preset((32, 64, 128, 256), (2, 2, 2, 2), "basic"),
    "18": _Preset((64, 128, 256, 512), (2, 2, 2, 2), "basic"),
    "34": _Preset((64, 128, 256, 512), (3, 4, 6, 3), "basic"),
    "50": _Preset(_WIDE, (3, 4, 6, 3), "bottleneck"),
    "101": _Preset(_WIDE, (3, 4, 23, 3), "bottleneck"),
}


class ResNet(Encoder):
    """ResNet from scratch, its mean-pooled map projected to d; with ``pie``, attention over the map as well.

    Stems: ``large`` is the published one (7x7 stride 2, max-pool: a quarter of the side), ``medium`` a 3x3
    convolution of stride 2, ``small`` a 3x3 convolution of stride 1 (CIFAR ResNets). ``auto`` goes by the shorter
    side: small up to 40 pixels, medium up to 96, large beyond, so that the last map is 3x3 or more.
    """

    projecting = ("pie", "dropout")

    norm: MapNorm = "batch"
    view: SerializeAsAny[View] = Pixels(size=64)
    size: Literal["tiny", "small", "18", "34", "50", "101"] = Field(default="tiny", description="architecture")
    widths: tuple[int, ...] | None = Field(default=None, min_length=1, description="channels by stage, over `size`")
    depths: tuple[int, ...] | None = Field(default=None, min_length=1, description="blocks by stage, over `size`")
    block: _BlockType | None = Field(default=None, description="type of block, over `size`")
    stem: Literal["auto", "small", "medium", "large"] = Field(default="auto", description="first convolution")
    pie: bool = Field(default=False, description="attention over the map (PVSE, CreamFL)")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of the pooled vector dropped in training")

    @model_validator(mode="after")
    def _stages_agree(self) -> Self:
        widths, depths, block = self._stages()
        if len(widths) != len(depths):
            raise ValueError(f"widths {list(widths)} and depths {list(depths)} differ in their number of stages")
        if block == "bottleneck" and any(width % 4 for width in widths):
            raise ValueError(f"widths {list(widths)}: bottleneck blocks need multiples of 4")
        return self

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps images [b, c, h, w] to [b, dim].

        Raises:
            ConfigError: the view gives no images.
        """
        channels, height, width = image_shape(spec, "resnet")
        widths, depths, block = self._stages()
        trunk = normed(_Trunk(channels, widths, depths, block), self.norm)
        if (stem := self._stem(min(height, width))) != "large":
            trunk.embedder.shrink(1 if stem == "small" else 2)
        channels_last(trunk)  # weights too, or every convolution would convert them
        return EncoderTower(trunk, widths[-1], dim, pie=widths[-1] if self.pie else None, dropout=self.dropout)

    def _stem(self, side: int) -> str:
        if self.stem != "auto":
            return self.stem
        if side > 96:
            return "large"
        return "small" if side <= 40 else "medium"

    def _stages(self) -> _Preset:
        preset = _PRESETS[self.size]
        return _Preset(self.widths or preset.widths, self.depths or preset.depths, self.block or preset.block)


class _Trunk(nn.Module):
    """Stem and stages, whose tensors are called, and begin, as those of ``transformers.ResNetModel``.

    It is not imported, as transformers takes seconds to import.
    """

    def __init__(self, channels: int, widths: Sequence[int], depths: Sequence[int], block: _BlockType) -> None:
        super().__init__()
        before = min(64, widths[0])
        self.embedder = _Stem(channels, before)
        self.encoder = nn.Module()
        stages = []
        for number, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            first = _Block(before, width, 2 if number else 1, block)
            stage = nn.Module()
            stage.layers = nn.Sequential(first, *(_Block(width, width, 1, block) for _ in range(depth - 1)))
            stages.append(stage)
            before = width
        self.encoder.stages = nn.ModuleList(stages)
        for convolution in [module for module in self.modules() if isinstance(module, nn.Conv2d)]:
            nn.init.normal_(convolution.weight)  # which transformers draws first
            _begin(convolution)

    def forward(self, x: Float[Tensor, "b c h w"]) -> LocalFeatures:
        x = self.embedder(laid_out(x))
        for stage in self.encoder.get_submodule("stages").children():
            x = stage.get_submodule("layers")(x)
        return from_map(x)


class _Stem(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.embedder = _Layer(channels, width, 7, 2)
        self.pooler: nn.Module = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)

    def shrink(self, stride: int) -> None:
        """Become a 3x3 convolution, without the max-pool, which would halve a small map again."""
        old = self.embedder.convolution
        # drawn last, so that a stem changes no other weight
        new = nn.Conv2d(old.in_channels, old.out_channels, 3, stride=stride, padding=1, bias=False)
        _begin(new)
        self.embedder.convolution = new
        self.pooler = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.pooler(self.embedder(x))
        return features


class _Layer(nn.Module):
    """A convolution and its norm, and a ReLU unless it is ``linear``."""

    def __init__(self, channels: int, width: int, size: int = 3, stride: int = 1, *, linear: bool = False) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, width, size, stride=stride, padding=size // 2, bias=False)
        self.normalization = nn.BatchNorm2d(width)
        self.activation = nn.Identity() if linear else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.activation(self.normalization(self.convolution(x)))
        return features


class _Block(nn.Module):
    """Two convolutions, or three of which the middle one has a quarter of the channels, and a shortcut."""

    def __init__(self, channels: int, width: int, stride: int, block: _BlockType) -> None:
        super().__init__()
        changes = channels != width or stride != 1
        self.shortcut = _Layer(channels, width, 1, stride, linear=True) if changes else nn.Identity()
        narrow = width // 4
        self.layer = (
            nn.Sequential(_Layer(channels, width, 3, stride), _Layer(width, width, linear=True))
            if block == "basic"
            else nn.Sequential(
                _Layer(channels, narrow, 1), _Layer(narrow, narrow, 3, stride), _Layer(narrow, width, 1, linear=True)
            )
        )
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        features = self.layer(x)
        features += self.shortcut(x)  # in place: a map less to keep
        rectified: Tensor = self.activation(features)
        return rectified


def _begin(convolution: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
