"""Vision transformer image encoder (Dosovitskiy et al., ICLR 2021), from ``transformers``."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from jaxtyping import Float
from pydantic import Field, SerializeAsAny
from torch import Tensor, nn

from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels
from polyfed.models.encoder import Encoder, check_patches, image_shape
from polyfed.models.towers import EncoderTower, LocalFeatures


class _Preset(NamedTuple):
    width: int
    layers: int
    heads: int
    patch: int


_PRESETS = {
    "nano": _Preset(96, 4, 3, 8),
    "tiny": _Preset(192, 12, 3, 16),
    "small": _Preset(384, 12, 6, 16),
    "base": _Preset(768, 12, 12, 16),
}


class ViT(Encoder):
    """Pre-norm ViT from scratch, its CLS or mean patch token projected to d; with ``pie``, attention over patches."""

    view: SerializeAsAny[View] = Pixels(size=64)
    size: Literal["nano", "tiny", "small", "base"] = Field(
        default="nano", description="architecture (small is ViT-S/16)"
    )
    patch: int | None = Field(default=None, ge=1, description="side of a patch in pixels, over `size`")
    pooling: Literal["cls", "mean"] = Field(default="cls", description="CLS token, or mean of the patch tokens")
    pie: bool = Field(default=False, description="attention over the patch tokens")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout within the transformer")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps images [b, c, h, w] to [b, dim].

        Raises:
            ConfigError: the view gives no images, or of a size that patches do not divide.
        """
        trunk = self._model(image_shape(spec, "vit"))
        width = int(trunk.config.hidden_size)
        return EncoderTower(_ViTTrunk(trunk, self.pooling), width, dim, pie=width if self.pie else None)

    def _model(self, shape: tuple[int, int, int]) -> Any:
        from transformers import ViTConfig, ViTModel

        width, layers, heads, patch = _PRESETS[self.size]
        patch = self.patch or patch
        check_patches(shape, patch, "vit")
        config = ViTConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            image_size=shape[1:],
            patch_size=patch,
            num_channels=shape[0],
            hidden_dropout_prob=self.dropout,
            layer_norm_eps=1e-6,
        )
        return ViTModel(config, add_pooling_layer=False)


class _ViTTrunk(nn.Module):
    def __init__(self, model: Any, pooling: str) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling

    def forward(self, x: Float[Tensor, "b c h w"]) -> LocalFeatures:
        tokens: Tensor = self.model(x).last_hidden_state
        # CLS is no position of the picture
        patches = tokens[:, 1:]
        return LocalFeatures(tokens[:, 0] if self.pooling == "cls" else patches.mean(1), patches)
