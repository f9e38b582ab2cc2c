"""ResNet image encoder (He et al., CVPR 2016), from ``transformers``."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self

from jaxtyping import Float
from pydantic import Field, SerializeAsAny, model_validator
from torch import Tensor, nn

from polyfed.data.convolutions import channels_last
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels
from polyfed.models.convolutional import MapNorm, laid_out, normed
from polyfed.models.encoder import Encoder, image_shape
from polyfed.models.towers import EncoderTower, LocalFeatures, from_map

_BlockKind = Literal["basic", "bottleneck"]


class _Preset(NamedTuple):
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    block: _BlockKind


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
    block: _BlockKind | None = Field(default=None, description="kind of block, over `size`")
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
        trunk = self._model(channels)
        stem = self._stem(min(height, width))
        if stem != "large":
            old = trunk.embedder.embedder.convolution
            stride = 1 if stem == "small" else 2
            # drawn after the rest, so that a stem changes no other weight
            new = nn.Conv2d(old.in_channels, old.out_channels, 3, stride=stride, padding=1, bias=False)
            nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
            trunk.embedder.embedder.convolution = new
            # the published max-pool would halve a small map again
            trunk.embedder.pooler = nn.Identity()
        channels_out = int(trunk.config.hidden_sizes[-1])
        pie = channels_out if self.pie else None
        return EncoderTower(_ResNetTrunk(trunk), channels_out, dim, pie=pie, dropout=self.dropout)

    def _stem(self, side: int) -> str:
        if self.stem != "auto":
            return self.stem
        if side > 96:
            return "large"
        return "small" if side <= 40 else "medium"

    def _model(self, channels: int) -> Any:
        from transformers import ResNetConfig, ResNetModel

        widths, depths, block = self._stages()
        config = ResNetConfig(
            num_channels=channels,
            embedding_size=min(64, widths[0]),
            hidden_sizes=list(widths),
            depths=list(depths),
            layer_type=block,
        )
        return normed(ResNetModel(config), self.norm)

    def _stages(self) -> _Preset:
        preset = _PRESETS[self.size]
        return _Preset(self.widths or preset.widths, self.depths or preset.depths, self.block or preset.block)


class _ResNetTrunk(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedder = model.embedder
        self.encoder = model.encoder
        # weights too, or every convolution would convert them
        channels_last(self)

    def forward(self, x: Float[Tensor, "b c h w"]) -> LocalFeatures:
        return from_map(self.encoder(self.embedder(laid_out(x))).last_hidden_state)
