"""MobileNetV2 image encoder (Sandler et al., CVPR 2018), from ``transformers``."""

from __future__ import annotations

from jaxtyping import Float
from pydantic import Field, SerializeAsAny
from torch import Tensor, nn

from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels
from polyfed.models.convolutional import MapNorm, normed
from polyfed.models.encoder import Encoder, image_shape
from polyfed.models.towers import EncoderTower, LocalFeatures, from_map


class MobileNet(Encoder):
    """MobileNetV2 from scratch, its mean-pooled map projected to d; with ``pie``, attention over the map too.

    Batch normalisation forgets at PyTorch's usual rate (momentum 0.1): ``transformers`` ships TensorFlow's
    0.997, which PyTorch reads the other way round, so that the running statistics would be those of the last
    batch.
    """

    projecting = ("pie", "dropout")

    norm: MapNorm = "batch"
    view: SerializeAsAny[View] = Pixels(size=96)
    multiplier: float = Field(default=1.0, ge=0.1, le=2, description="factor on all widths")
    pie: bool = Field(default=False, description="attention over the map (PVSE, CreamFL)")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of the pooled vector dropped in training")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps images [b, c, h, w] to [b, dim]; sides of 32 pixels or more make sense.

        Raises:
            ConfigError: the view gives no images.
        """
        from transformers import MobileNetV2Config, MobileNetV2Model

        channels, _, _ = image_shape(spec, "mobilenet")
        config = MobileNetV2Config(num_channels=channels, depth_multiplier=self.multiplier)
        model = normed(MobileNetV2Model(config), self.norm)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                # PyTorch's usual rate, see the class
                module.momentum = 0.1
        width = int(model.conv_1x1.convolution.out_channels)
        return EncoderTower(_MobileNetTrunk(model), width, dim, pie=width if self.pie else None, dropout=self.dropout)


class _MobileNetTrunk(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Float[Tensor, "b c h w"]) -> LocalFeatures:
        return from_map(self.model(x).last_hidden_state)
